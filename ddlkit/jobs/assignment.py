"""What torchrun or Slurm assigns to a rank: its numbers, its backend and its GPU.

These are pure functions of the environment and of the number of GPUs that the rank
sees. There is no torch here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from ddlkit.core.errors import UserError

GLOO_INSTEAD = (
    "or set CUDA_VISIBLE_DEVICES to nothing to measure the processors by gloo"
)
"""What a user may do who does not mean the GPUs of a node."""


class Numbers(NamedTuple):
    """The numbers that a launcher gives to a rank.

    Attributes
    ----------
    rank, world_size : int
        The number of the rank, and how many ranks there are.
    local_rank, ranks_on_node : int
        The number of the rank among those of its node, and how many these are.
    by_slurm : bool
        Whether Slurm numbered the ranks. Slurm can let each rank see only some of the
        GPUs of the node.
    """

    rank: int
    world_size: int
    local_rank: int
    ranks_on_node: int
    by_slurm: bool


def ranks_started(environment: Mapping[str, str]) -> int:
    """Return how many ranks torchrun or srun started, 1 if neither did.

    A "task" of Slurm is a process that may be a rank. All tasks that are started together,
    as by one srun, are a "step", and see its number. The script of a Slurm job, which runs
    once and is no rank, sees the number of tasks of the job, but no number of a step. Within
    a step, the number of tasks of the step counts, and not that of the job.

    Parameters
    ----------
    environment : mapping of str to str
        The environment of this process.

    Returns
    -------
    int
        The number of ranks.

    Raises
    ------
    UserError
        If the variable that holds the number of ranks is not a whole number.

    Examples
    --------
    >>> ranks_started({"WORLD_SIZE": "16"})
    16
    >>> ranks_started({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"})
    4
    >>> ranks_started({"SLURM_NTASKS": "4"}), ranks_started({})
    (1, 1)

    Slurm itself starts the shell of salloc as a step of one task, in a job of 8 tasks:

    >>> ranks_started({"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1",
    ...                "SLURM_NTASKS": "8"})
    1
    """
    # Slurm sets both names of the number of a step. The second one is the older name.
    step = environment.get("SLURM_STEP_ID") or environment.get("SLURM_STEPID")
    # Without a step this process is at most the script of a job. The empty name then lets
    # `_number` read no variable of Slurm.
    slurm_name = _name_of_task_count(environment) if step else ""
    return _number(environment, "WORLD_SIZE", slurm_name, default=1)


def is_started_by_launcher(environment: Mapping[str, str]) -> bool:
    """Return whether torchrun or srun started this process, even as the only rank.

    Parameters
    ----------
    environment : mapping of str to str
        The environment of this process.

    Examples
    --------
    >>> is_started_by_launcher({"WORLD_SIZE": "1"}), is_started_by_launcher({})
    (True, False)
    """
    # torchrun sets the first variable, and srun the other two. SLURM_NTASKS would not do,
    # because Slurm also sets it for the script of a job, which is no rank.
    names = ("WORLD_SIZE", "SLURM_STEP_ID", "SLURM_STEPID")
    return any(environment.get(name) for name in names)


def numbers(environment: Mapping[str, str]) -> Numbers:
    """Return the numbers that torchrun or Slurm gives to this rank.

    The variables of torchrun come first, because Slurm may start torchrun. Slurm's
    variables then describe the processes of torchrun and not the ranks.

    Parameters
    ----------
    environment : mapping of str to str
        The environment of this process.

    Returns
    -------
    Numbers
        The numbers of this rank.

    Raises
    ------
    UserError
        If the environment is incomplete or not made of whole numbers.

    Examples
    --------
    The third of 16 tasks, 8 of which run on each of two nodes:

    >>> numbers({"SLURM_PROCID": "2", "SLURM_NTASKS": "16", "SLURM_LOCALID": "2",
    ...          "SLURM_NODEID": "0", "SLURM_TASKS_PER_NODE": "8(x2)"})
    Numbers(rank=2, world_size=16, local_rank=2, ranks_on_node=8, by_slurm=True)
    """
    # Each call names torchrun's variable first and then Slurm's.
    rank = _number(environment, "RANK", "SLURM_PROCID")
    slurm_name = _name_of_task_count(environment)
    world_size = _number(environment, "WORLD_SIZE", slurm_name)
    # If a variable about the node is not set, all ranks are taken to be on one node. The
    # number within the node is then the rank, and the node has all ranks.
    local_rank = _number(environment, "LOCAL_RANK", "SLURM_LOCALID", default=rank)
    # torchrun and this library's launcher set RANK, and Slurm does not.
    by_slurm = not environment.get("RANK")
    if by_slurm:
        ranks_on_node = _tasks_on_node(environment, default=world_size)
    else:
        # torchrun sets LOCAL_WORLD_SIZE. Slurm's number of tasks on a node would be that of
        # torchrun's processes, each of which starts several ranks.
        ranks_on_node = _number(
            environment, "LOCAL_WORLD_SIZE", slurm_name="", default=world_size
        )
    return Numbers(rank, world_size, local_rank, ranks_on_node, by_slurm)


def _name_of_task_count(environment: Mapping[str, str]) -> str:
    """Return the name of the variable that says how many tasks the step of this process has.

    A task is a process that Slurm started, and a step is what one srun started.
    SLURM_NTASKS may be the number of tasks of the whole job, as in the interactive shell
    of salloc, so the variable of the step is preferred.
    """
    of_step = "SLURM_STEP_NUM_TASKS"
    return of_step if environment.get(of_step) else "SLURM_NTASKS"


def _tasks_on_node(environment: Mapping[str, str], default: int) -> int:
    """Return how many tasks Slurm started on this node, or ``default`` if it does not say.

    A task is a process that Slurm started. Slurm lists how many tasks each node has, as
    in "8(x2),3" for three nodes with 8, 8 and 3 tasks. There is a list for the step, which
    is what one srun started, and one for the whole job. The list of the step is
    preferred, because a step may have fewer tasks than its job. Without any list,
    SLURM_NTASKS_PER_NODE is read, which only the option --ntasks-per-node sets. Raises
    UserError if a list or a number cannot be read.
    """
    variable = "SLURM_STEP_TASKS_PER_NODE"
    if not environment.get(variable):
        variable = "SLURM_TASKS_PER_NODE"
    listed = environment.get(variable)
    if not listed:
        return _number(
            environment,
            torchrun_name="",
            slurm_name="SLURM_NTASKS_PER_NODE",
            default=default,
        )
    tasks_by_node = _parse_task_list(variable, listed)
    # The position of this node in the list, counted from 0.
    node = _number(environment, torchrun_name="", slurm_name="SLURM_NODEID", default=0)
    # If the list has no entry for this node, the list belongs to another step.
    if node >= len(tasks_by_node):
        return default
    return tasks_by_node[node]


def _parse_task_list(variable: str, listed: str) -> list[int]:
    """Return the number of tasks of each node, in the order of the nodes.

    ``listed`` is the value of Slurm's environment variable ``variable``, as in "8(x2),3"
    for the numbers 8, 8 and 3. Raises UserError if it cannot be read.
    """
    tasks_by_node: list[int] = []
    for entry in listed.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry.strip())
        if not match:
            raise UserError(f"{variable} is {listed}: start ranks with srun")
        # Without "(xN)" a number stands for one node.
        tasks, nodes = match.groups(default="1")
        tasks_by_node += [int(tasks)] * int(nodes)
    return tasks_by_node


def _number(
    environment: Mapping[str, str],
    torchrun_name: str,
    slurm_name: str,
    default: int | None = None,
) -> int:
    """Return the number in a variable of torchrun or, if it is not set, in one of Slurm.

    An empty name stands for no variable. If neither variable is set, the result is
    ``default``. Raises UserError if there is no default then, and for a variable that is
    set to something else than digits.
    """
    text = environment.get(torchrun_name) or environment.get(slurm_name)
    if not text and default is not None:
        return default
    if not text or not text.isdecimal():
        # The error names torchrun's variable if there is one, even if the text is that of
        # Slurm's. What it advises is right for both.
        name = torchrun_name or slurm_name
        raise UserError(
            f"{name} is {text or 'not set'} in this rank's environment: start ranks "
            "with torchrun, srun or ddlkit.jobs.launch"
        )
    return int(text)


def choose_backend(
    asked: str | None,
    ranks_on_node: int,
    gpus: int,
    *,
    by_slurm: bool = False,
    hidden_gpus: int = 0,
) -> str:
    """Return the backend of a rank: the one that is asked for, else NCCL if it sees GPUs.

    Parameters
    ----------
    asked : str or None
        ``"gloo"``, ``"nccl"``, or None for NCCL on GPUs and gloo elsewhere.
    ranks_on_node : int
        How many ranks this node has.
    gpus : int
        How many GPUs this rank sees.
    by_slurm : bool, optional
        Whether Slurm numbered the ranks. Each rank may then see other GPUs of the node.
    hidden_gpus : int, optional
        How many GPUs the node has although the rank sees none and nobody has hidden them
        on purpose.

    Returns
    -------
    str
        ``"gloo"`` or ``"nccl"``.

    Raises
    ------
    UserError
        If the backend is unknown, if ranks would have to share a GPU, or if no backend is
        asked for and the GPUs of the node are hidden.

    Examples
    --------
    >>> choose_backend(None, ranks_on_node=8, gpus=8)
    'nccl'
    >>> choose_backend(None, ranks_on_node=8, gpus=2, by_slurm=True)
    'nccl'
    >>> choose_backend(None, ranks_on_node=8, gpus=0)
    'gloo'
    """
    if asked not in (None, "gloo", "nccl"):
        raise UserError(f"unknown backend {asked!r}: use gloo or nccl")
    # The user of a node with GPUs hardly means to measure its processors.
    if asked is None and not gpus and hidden_gpus:
        raise UserError(
            f"this node has GPUs ({hidden_gpus}), but torch sees none: install a torch "
            "with CUDA that the driver supports, ask Slurm for the GPUs, "
            f"{GLOO_INSTEAD}"
        )
    backend = asked or ("nccl" if gpus else "gloo")
    # NCCL needs a GPU for each rank. A rank that Slurm did not number must see as many GPUs as
    # the node has ranks. Slurm can let each rank see only GPUs of its own (--gpus-per-task), or
    # some of the node (--gpu-bind), so there one visible GPU is enough. If two ranks are bound
    # to one GPU nevertheless, NCCL refuses to begin.
    bound_by_slurm = by_slurm and gpus > 0
    if backend == "gloo" or bound_by_slurm or ranks_on_node <= gpus:
        return backend
    raise UserError(
        f"nccl needs a GPU for each rank: {ranks_on_node} ranks on this node, {gpus} "
        f"GPUs: start fewer ranks, {GLOO_INSTEAD}"
    )


def hides_gpus(visible: str | None) -> bool:
    """Return whether a value of CUDA_VISIBLE_DEVICES hides all GPUs on purpose.

    CUDA sees no GPU if the first entry is neither a number nor the identity of a GPU. One
    such entry, "NoDevFiles", is not on purpose: Slurm writes it for a process to which it
    gave no GPUs.

    Parameters
    ----------
    visible : str or None
        The value: entries separated by commas. None if the variable is not set, which
        hides no GPU.

    Returns
    -------
    bool

    Examples
    --------
    >>> hides_gpus(""), hides_gpus("-1"), hides_gpus("none")
    (True, True, True)
    >>> hides_gpus(None), hides_gpus("0,-1"), hides_gpus("NoDevFiles")
    (False, False, False)
    """
    if visible is None:
        return False
    first = visible.split(",")[0].strip()
    # The first two prefixes are those of identities, and the last is of "NoDevFiles".
    return not first.isdecimal() and not first.startswith(("GPU-", "MIG-", "NoDev"))


def gpu_of(local_rank: int, gpus: int) -> int:
    """Return the number of a rank's GPU among those that it sees.

    The numbers of the GPUs that a rank sees begin at 0. Ranks that see fewer GPUs than
    the node has ranks take them in turn. So a rank that sees one GPU takes that one.

    Parameters
    ----------
    local_rank : int
        The number of the rank among those of its node.
    gpus : int
        How many GPUs the rank sees, at least 1.

    Returns
    -------
    int
        The number, counted from 0.

    Examples
    --------
    >>> gpu_of(local_rank=3, gpus=8), gpu_of(local_rank=3, gpus=1)
    (3, 0)
    >>> gpu_of(local_rank=5, gpus=4)
    1
    """
    return local_rank % gpus
