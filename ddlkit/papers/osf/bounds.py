"""What osf Eqs 3, 4, 7 and 11 allow at most, whatever the batch size and the network."""

from __future__ import annotations

from ddlkit.core.errors import UserError

HIDDEN = 2 / 3
"""Share of T_comp that overlap can hide: the backward pass (osf Eq 4)."""


def largest_fusion_gain(constant_sf: float, saved_overhead: float = 0.0) -> float:
    """Upper bound on T_constant / T_other - 1 over all fusion plans, under osf Eqs 4, 7 and 11.

    Every plan sends the same bytes. Another plan hides at most the backward pass, 2/3 T_comp
    (Eq 4), saves at most ``saved_overhead`` = (k - 1) delta / T_comp (Eq 7, k messages of the
    constant plan), and never takes less than T_comp. ``constant_sf`` is the constant plan's
    scaling factor, T_comp / T_constant (Eq 11).
    """
    if not 0 < constant_sf <= 1:
        raise UserError(f"scaling factor is {constant_sf}: must be above 0 and at most 1")
    constant = 1 / constant_sf
    return constant / max(1.0, constant - HIDDEN - saved_overhead) - 1


def least_iteration_s(
    constant_s: float, compute_s: float, messages: int = 1, overhead_s: float = 0.0
) -> float:
    """Least time that any fusion plan takes, if a plan of ``messages`` takes ``constant_s``.

    T >= max(T_comp, T_constant - 2/3 T_comp - (k - 1) delta), with T_comp = compute_s, k = messages,
    delta = overhead_s, for every plan under osf Eqs 4, 7 and 11. Proof: let b be the time of all bytes.

    * The constant plan never takes more than computing first, then sending everything (no overlap):
      T_constant <= T_comp + k delta + b, since max(end, ready) <= end + (later of all ready - ready).
    * No plan sends before forward is over, a third of T_comp (Eq 4), and it sends the same bytes in
      at least one message: T >= T_comp / 3 + delta + b.

    The difference of the two is the bound. A timeout changes neither: what waits for a tensor that is
    too late still leaves before that tensor, so before backward ends.
    """
    return max(compute_s, constant_s - HIDDEN * compute_s - (messages - 1) * overhead_s)


def least_overhead_for_gain(gain: float, constant_sf: float | None = None) -> float:
    """Least (k - 1) delta / T_comp with which ``largest_fusion_gain`` reaches ``gain``.

    For a constant plan of that scaling factor, or for the most favourable one, SF = 1 / (1 + gain).
    Infinite where even perfect overlap gains less.
    """
    constant = 1 + gain if constant_sf is None else 1 / constant_sf
    if constant < (1 + gain) * (1 - 1e-12):
        return float("inf")
    return max(0.0, constant * gain / (1 + gain) - HIDDEN)


def largest_scaling_loss(communication_growth: float) -> float:
    """Upper bound on the relative loss of SF when communication grows by a factor 1 + growth.

    osf Eq 3: no iteration grows by more than its communication, so SF falls by at most
    1 - 1 / (1 + growth).
    """
    return 1 - 1 / (1 + communication_growth)
