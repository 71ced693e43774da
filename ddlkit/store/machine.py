"""A description of this machine: its hardware and its software.

Torch is not imported. It is asked for its versions only where it is already loaded.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import itertools
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddlkit.core.errors import UserError

# What is left out of the model of a processor: "(R)" and "(TM)", the clock behind an
# "@", and words that all processors of a maker carry, also as in "8-core". Without
# them, names still differ between machines.
_NOISE = r"\((r|tm)\)|@.*|\b(cpu|processor|platinum|gold|silver|bronze|[\w-]+-core)\b"


def describe() -> dict[str, Any]:
    """Return a description of the machine, without its host name and addresses.

    Returns
    -------
    dict
        "name", "cpu" (with "model", "cores" and "quota_cores"), "memory_bytes", "os",
        "kernel", "gpus", "nics" and "nccl_variables". "name" is made of the hardware, as
        in "8x-nvidia-h200". "cores" is the number of cores that this process may use.
        "quota_cores" is how many of them a container may keep busy, 0 if there is no such
        limit. "nics" are the network adapters with their rates. "nccl_variables" are the
        environment variables that NCCL and PyTorch's use of NCCL obey, as
        `own_nccl_variables` returns them. Where there are GPUs, "topology" says how they
        are connected, as nvidia-smi draws it.
    """
    cpu = {"model": _cpu_model(), "cores": cores(), "quota_cores": _quota_cores()}
    described = {
        "name": name(),
        "cpu": cpu,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "os": _operating_system(),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "gpus": _gpus_with_settings(),
        "nics": nics(),
        "nccl_variables": own_nccl_variables(),
    }
    if described["gpus"]:
        described["topology"] = topology()
    return described


def _quota_cores() -> float:
    """Return how many cores the container may keep busy, 0 if there is no limit."""
    # Linux writes the processor time that the container may use in each period, and the
    # length of a period, both in microseconds. Without a limit, "max" stands for the time.
    quota, _, period = content(Path("/sys/fs/cgroup/cpu.max")).partition(" ")
    # The quota is "max", or "" if there is no such file.
    if not quota.isdigit():
        return 0.0
    return float(quota) / float(period)


def _operating_system() -> str:
    """Return the name of the operating system with its version."""
    # Linux distributions have this file. On other systems it is read as "".
    release = content(Path("/etc/os-release"))
    pretty_name = re.search(r'^PRETTY_NAME="?([^"\n]+)', release, re.MULTILINE)
    return pretty_name[1] if pretty_name else platform.platform()


def name(device: str = "") -> str:
    """Return a name of the machine, which can also name a folder.

    Parameters
    ----------
    device : str, optional
        "cpu" to name the machine by its processor even if it has GPUs. By default, it
        is named by its GPUs, and by its processor only if it has none.

    Returns
    -------
    str
        For example "8x-nvidia-h200" for 8 GPUs, "nvidia-h200" for one, or
        "cpu-2x-intel-xeon-8488c" for 2 cores.
    """
    gpus = _gpus()
    if not gpus or device == "cpu":
        return f"cpu-{cores()}x-{_slug(_cpu_model())}"
    # All GPUs of a machine are taken to be of the model of the first one.
    slug = _slug(gpus[0]["model"])
    return f"{len(gpus)}x-{slug}" if len(gpus) > 1 else slug


def identity() -> str:
    """Return a text that tells this machine from all others.

    It serves only to compare machines during a run. Callers never record it, so that no
    table identifies a machine. Containers of one machine have the same text on Linux.
    """
    # The kernel draws this number at random when it boots.
    boot_id = content(Path("/proc/sys/kernel/random/boot_id"))
    # On other systems than Linux, the name of the host stands in.
    return boot_id or platform.node()


def versions() -> dict[str, str]:
    """Return the versions of the software that measures.

    Returns
    -------
    dict of str to str
        The versions of python, torch, torchvision, numpy, pandas, cuda, cudnn and nccl.
        The version of software that is absent is "none". That of cudnn has three
        numbers, as in "9.10.2".
    """
    cuda, nccl = _cuda_and_nccl()
    return {
        "python": platform.python_version(),
        "torch": installed("torch"),
        "torchvision": installed("torchvision"),
        "numpy": installed("numpy"),
        "pandas": installed("pandas"),
        "cuda": cuda,
        # The version of CUDA is needed for the name of cuDNN's package, as in
        # nvidia-cudnn-cu12.
        "cudnn": _cudnn(cuda),
        "nccl": nccl,
    }


def installed(package: str) -> str:
    """Return the version of an installed package, "none" if it is absent."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def commit(directory: Path = Path(__file__).parents[1]) -> str:
    """Return the commit of the code in a folder.

    Parameters
    ----------
    directory : Path, optional
        The folder. By default it is the one of this library.

    Returns
    -------
    str
        12 hex digits, with "+dirty" if the code in the folder differs from the commit.
        Outside of git, the result is the value of the variable DDLKIT_COMMIT with at most
        12 digits, or "unknown" if that is not set.

    Raises
    ------
    UserError
        If DDLKIT_COMMIT is needed, and is not a commit.
    """
    git = ("git", "-C", str(directory))
    # `output` returns "" if git is absent or fails.
    head = output(*git, "rev-parse", "--short=12", "HEAD").strip()
    # An installed library may lie in the work tree of a repository that does not contain
    # it, such as a user's. In that case git lists no file of the folder.
    tracked_files = output(*git, "ls-files", ".")
    if head and tracked_files:
        changed_files = output(*git, "status", "--porcelain", ".")
        return f"{head}+dirty" if changed_files else head
    stated = os.environ.get("DDLKIT_COMMIT", "")
    if not stated:
        return "unknown"
    match = re.fullmatch(r"([0-9a-f]{7,40})(\+dirty)?", stated)
    if not match:
        advice = "give 7 to 40 hex digits, with +dirty if changed"
        raise UserError(f"DDLKIT_COMMIT is {stated!r}: {advice}")
    digits, dirty = match.groups()
    return digits[:12] + (dirty or "")


def output(*command: str) -> str:
    """Return the output of a program, "" if it is absent, fails or takes over 20 s."""
    # nvidia-smi may hang on a broken driver, and git on a network file system.
    try:
        completed = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return completed.stdout if completed.returncode == 0 else ""


def content(path: Path) -> str:
    """Return the text of a file of the kernel, "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def cores() -> int:
    """Return the number of cores that this process may use."""
    # A process may be bound to some of the cores, and 0 stands for this process. macOS
    # has no such call.
    affinity = getattr(os, "sched_getaffinity", None)
    if affinity:
        return len(affinity(0))
    # Python returns None if it cannot tell the number.
    return os.cpu_count() or 1


def _slug(text: str) -> str:
    """Return a model's name as a word of a file name, such as "intel-xeon-8488c".

    It has small letters, digits and hyphens. Words that all processors of a maker have,
    such as "CPU", are left out.
    """
    words = re.sub(_NOISE, " ", text.lower())
    return re.sub(r"[^a-z0-9]+", "-", words).strip("-") or "unknown"


def _cpu_model() -> str:
    """Return the model of the processor, or its architecture if the model is not known."""
    cpuinfo = content(Path("/proc/cpuinfo"))
    model = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    if model:
        return model[1].strip()
    # macOS has no /proc, but it has a program that prints the model.
    brand = output("sysctl", "-n", "machdep.cpu.brand_string").strip()
    return brand or platform.machine()


def ask_gpus(fields: Sequence[str], *options: str, about: str = "gpu") -> str:
    """Return what nvidia-smi says about the GPUs, or about the processes on them.

    Parameters
    ----------
    fields : sequence of str
        What to ask for, by nvidia-smi's names, such as "clocks.sm".
    *options : str
        Further options of nvidia-smi.
    about : str, optional
        "gpu", or "compute-apps" for the processes on the GPUs.

    Returns
    -------
    str
        A line for each GPU or process, with cells that are separated by commas, in the
        order of ``fields``. "" if there is no nvidia-smi, or if it does not know a field.
    """
    return output(*gpu_question(fields, *options, about=about))


def gpu_question(
    fields: Sequence[str], *options: str, about: str = "gpu"
) -> tuple[str, ...]:
    """Return the command by which nvidia-smi is asked, with arguments as of `ask_gpus`."""
    query = f"--query-{about}={','.join(fields)}"
    return ("nvidia-smi", query, "--format=csv,noheader,nounits", *options)


def cells(text: str) -> list[list[str]]:
    """Return the cells of each line of an output of `ask_gpus`."""
    rows = []
    for line in text.splitlines():
        if line:
            rows.append([cell.strip() for cell in line.split(",")])
    return rows


def parse_gpus(text: str) -> tuple[dict[str, Any], ...]:
    """Return the GPUs in an output of `ask_gpus`.

    Parameters
    ----------
    text : str
        A line for each GPU, with name, driver_version, memory.total (in MiB) and
        compute_cap. Other lines, such as "No devices were found", are ignored.

    Returns
    -------
    tuple of dict
        "model", "driver", "memory_bytes" (0 if it is unknown) and "compute_capability"
        of each GPU.
    """
    gpus = []
    for row in cells(text):
        # A line such as "No devices were found" has fewer cells.
        if len(row) != 4:
            continue
        model, driver, memory_mib, capability = row
        gpu = {
            "model": model,
            "driver": driver,
            # nvidia-smi prints "[N/A]" and the like for what it does not know.
            "memory_bytes": int(memory_mib) * 2**20 if memory_mib.isdigit() else 0,
            "compute_capability": capability,
        }
        gpus.append(gpu)
    return tuple(gpus)


@functools.cache
def _gpus() -> tuple[dict[str, Any], ...]:
    """Return the GPUs of this machine, as `parse_gpus` describes them."""
    fields = ("name", "driver_version", "memory.total", "compute_cap")
    return parse_gpus(ask_gpus(fields))


_SETTINGS = {
    "power_limit_w": ("power.limit",),
    "sm_clock_mhz": ("clocks.sm",),
    "most_sm_clock_mhz": ("clocks.max.sm",),
    "memory_clock_mhz": ("clocks.mem",),
    # Drivers from 535 on have the first name, and older ones the second.
    "throttle_reasons": (
        "clocks_event_reasons.active",
        "clocks_throttle_reasons.active",
    ),
    "ecc": ("ecc.mode.current",),
    "pcie_generation": ("pcie.link.gen.max",),
    "pcie_width": ("pcie.link.width.max",),
}
"""What else is recorded of a GPU, and the names by which nvidia-smi knows it."""


def gpu_settings(*options: str) -> list[dict[str, str]]:
    """Return the limits, clocks and states of GPUs, as nvidia-smi prints them.

    Parameters
    ----------
    *options : str
        Options of nvidia-smi, such as ``"-i"`` and the UUID of a GPU.

    Returns
    -------
    list of dict
        For each GPU the values of the settings that the driver knows, by the keys of
        `_SETTINGS`. The list is empty without nvidia-smi.
    """
    # Some settings have several names, because drivers name them differently. All settings
    # are asked for together, each by the first of its names. nvidia-smi answers nothing at
    # all if it does not know one of these, and is then asked for one setting at a time.
    first_names = [names[0] for names in _SETTINGS.values()]
    rows = cells(ask_gpus(first_names, *options))
    if rows:
        # `strict=False`: a line that is cut short gives fewer settings, and no error.
        return [dict(zip(_SETTINGS, row, strict=False)) for row in rows]
    return _settings_one_by_one(*options)


def _settings_one_by_one(*options: str) -> list[dict[str, str]]:
    """Return the settings of GPUs, for which nvidia-smi is asked one by one.

    A setting may have several names in `_SETTINGS`, because drivers name it differently.
    `gpu_settings` asks for all settings together, each by the first of its names. It calls
    this function if the driver does not know one of these names, because nvidia-smi then
    gives no answer at all. The result is that of `gpu_settings`. ``options`` are further
    options of nvidia-smi.
    """
    gpus: list[dict[str, str]] = []
    for setting, names in _SETTINGS.items():
        answers = [cells(ask_gpus([name], *options)) for name in names]
        # The answer to the first name that the driver knows: a row of one cell for each
        # GPU. There are no rows if it knows none of them.
        rows = next((answer for answer in answers if answer), [])
        for number, row in enumerate(rows):
            # The first setting that is known makes the entries of all GPUs.
            if number == len(gpus):
                gpus.append({})
            gpus[number][setting] = row[0]
    return gpus


@functools.cache
def _settings_at_start() -> tuple[dict[str, str], ...]:
    # Asking takes up to a second, and the machine is described for every table.
    return tuple(gpu_settings())


def _gpus_with_settings() -> list[dict[str, Any]]:
    """Return the GPUs, each with the settings that it had at the first call."""
    gpus = _gpus()
    if not gpus:
        return []
    settings = _settings_at_start()
    # If nvidia-smi did not answer for every GPU, nothing says which settings belong to
    # which GPU, and all are left out. Copies are returned, because `gpus` is cached.
    if len(settings) != len(gpus):
        return [dict(gpu) for gpu in gpus]
    return [
        {**gpu, **settings_of_gpu}
        for gpu, settings_of_gpu in zip(gpus, settings, strict=True)
    ]


@functools.cache
def topology() -> str:
    """Return how GPUs, network adapters and processors are connected, without host names.

    Returns
    -------
    str
        The matrix of ``nvidia-smi topo -m``, "" without nvidia-smi.
    """
    drawn = output("nvidia-smi", "topo", "-m")
    # nvidia-smi underlines the header by escape sequences of terminals.
    plain = re.sub(r"\x1b\[[0-9;]*m", "", drawn)
    return _without_hosts(plain).strip()


def gpus_of_node() -> int:
    """Return how many GPUs of NVIDIA this machine has, also those that CUDA may not use.

    Slurm can hide GPUs from a process. nvidia-smi then does not list them, but the driver
    still has a folder for each.
    """
    folders = list(Path("/proc/driver/nvidia/gpus").glob("*"))
    # The larger number counts, because each of the two ways may miss GPUs.
    return max(len(folders), len(_gpus()))


@functools.cache
def gpu_uuids() -> tuple[str, ...]:
    """Return the identities of the GPUs that nvidia-smi lists, in its order.

    An identity is a text such as "GPU-5f7e...", and is never recorded. There are none
    without nvidia-smi.
    """
    rows = cells(ask_gpus(["uuid"]))
    # Any other line is a complaint, such as "No devices were found".
    return tuple(row[0] for row in rows if row[0].startswith("GPU-"))


def visible_gpus(visible: str | None, uuids: Sequence[str]) -> list[str]:
    """Return the GPUs that CUDA may use, in the order in which CUDA numbers them.

    Parameters
    ----------
    visible : str or None
        The value of CUDA_VISIBLE_DEVICES: numbers of GPUs or the beginnings of their
        identities, separated by commas. None if the variable is not set, so that CUDA may
        use all GPUs.
    uuids : sequence of str
        The identities of all GPUs, as `gpu_uuids` returns them. A number stands for the
        GPU at this position, counted from 0.

    Returns
    -------
    list of str
        The identities of the GPUs.

    Examples
    --------
    >>> visible_gpus("2,0", ["GPU-a", "GPU-b", "GPU-c"])
    ['GPU-c', 'GPU-a']
    >>> visible_gpus("GPU-b", ["GPU-a", "GPU-b", "GPU-c"])
    ['GPU-b']
    """
    if visible is None:
        return [*uuids]
    chosen: list[str] = []
    for entry in visible.split(","):
        entry = entry.strip()
        if entry.isdecimal():
            # A slice, which is empty if there is no GPU of this number.
            matching = [*uuids[int(entry) : int(entry) + 1]]
        else:
            # Every identity begins with an empty text, so an empty entry is left out.
            matching = [uuid for uuid in uuids if entry and uuid.startswith(entry)]
        # CUDA ignores an entry that fits no GPU, and all entries behind it. Here an entry
        # that fits several GPUs is ignored in the same way.
        if len(matching) != 1:
            break
        chosen += matching
    return chosen


def links_between_gpus(matrix: str, uuids: Sequence[str]) -> dict[str, dict[str, str]]:
    r"""Return the kind of link between each pair of GPUs.

    Parameters
    ----------
    matrix : str
        The matrix of nvidia-smi, as `topology` returns it.
    uuids : sequence of str
        The identities of the GPUs in the matrix, in its order.

    Returns
    -------
    dict of str to dict
        For each GPU the word of the matrix for its link to each other GPU, such as
        "NV18" for NVLink or "SYS" for a way over PCIe and between processors. The dict is
        empty if the matrix has not as many GPUs as ``uuids``.

    Examples
    --------
    >>> matrix = "      GPU0 GPU1\nGPU0   X   NV18\nGPU1  NV18  X"
    >>> links_between_gpus(matrix, ["GPU-a", "GPU-b"])
    {'GPU-a': {'GPU-b': 'NV18'}, 'GPU-b': {'GPU-a': 'NV18'}}
    """
    rows = []
    for line in matrix.splitlines():
        words = line.split()
        # The row of a GPU has an X where it meets itself. The head of the matrix has none.
        if re.match(r"\s*GPU\d+\s", line) and "X" in words:
            # The first word is the name of the GPU.
            rows.append(words[1:])
    if len(rows) != len(uuids):
        return {}
    links: dict[str, dict[str, str]] = {}
    for uuid, words in zip(uuids, rows, strict=True):
        # The first columns of the matrix are the GPUs, in the order of the rows. Those of
        # network adapters and processors follow, so a row has more words, which
        # `strict=False` leaves out.
        by_other_gpu = dict(zip(uuids, words, strict=False))
        # The X, where the GPU meets itself, is no link.
        by_other_gpu.pop(uuid)
        links[uuid] = by_other_gpu
    return links


def gpu_link(used: Sequence[str], links: Mapping[str, Mapping[str, str]]) -> str:
    """Return the kind of link by which GPUs talk to each other, as tables name it.

    Parameters
    ----------
    used : sequence of str
        The identities of the GPUs that talk.
    links : mapping of str to mapping
        The known links, as `links_between_gpus` returns them. GPUs and pairs may be
        missing.

    Returns
    -------
    str
        "nvlink" if NVLink joins every pair of the GPUs, and "pcie" if there is a pair
        that it does not join. The result is "nccl", the library that chooses the link, if
        the link of a pair is not known, or if there is no pair.

    Examples
    --------
    >>> links = {"a": {"b": "NV18", "c": "SYS"}, "b": {"a": "NV18", "c": "SYS"}}
    >>> gpu_link(["a", "b"], links), gpu_link(["a", "b", "c"], links)
    ('nvlink', 'pcie')
    >>> gpu_link(["a"], links), gpu_link(["a", "d"], links)
    ('nccl', 'nccl')
    """
    links_of_pairs = []
    for first, second in itertools.combinations(used, 2):
        # A link is the same in both directions, and one of the two entries may be missing.
        link = links.get(first, {}).get(second) or links.get(second, {}).get(first)
        if link is None:
            return "nccl"
        links_of_pairs.append(link)
    # A single GPU makes no pair.
    if not links_of_pairs:
        return "nccl"
    # NV18, for example, stands for 18 bonded NVLinks. All other words stand for ways over
    # PCIe.
    has_nvlink = all(link.startswith("NV") for link in links_of_pairs)
    return "nvlink" if has_nvlink else "pcie"


def nics() -> list[dict[str, str]]:
    """Return the network adapters of this machine with their rates, as Linux names them.

    Each has a "name", a "kind" (such as "InfiniBand" or "network") and a "rate" in words.
    An adapter that is both an InfiniBand port and a network interface can be listed twice.
    On systems other than Linux the list is empty.
    """
    adapters = []
    # The folder of a port is, for example, mlx5_0/ports/1, where mlx5_0 is the adapter.
    for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*")):
        adapter = {
            "name": f"{port.parents[1].name}:{port.name}",
            "kind": content(port / "link_layer") or "InfiniBand",
            "rate": content(port / "rate"),
        }
        adapters.append(adapter)
    # Interfaces of software, such as bridges, have no device.
    for device in sorted(Path("/sys/class/net").glob("*/device")):
        speed = content(device.parent / "speed")
        # An interface that is down has no speed, or the speed -1.
        rate = f"{speed} Mb/s" if speed.isdecimal() else "unknown"
        adapters.append({"name": device.parent.name, "kind": "network", "rate": rate})
    return adapters


_NAMES_HOSTS = re.compile(r"_(COMM_ID|HOSTID|HOSTNAME|HOST|ADDR|ADDR_RANGE)$")
"""The ends of the names of variables whose values are hosts or addresses."""


def nccl_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that NCCL and PyTorch's use of NCCL obey.

    Parameters
    ----------
    environment : mapping of str to str
        The environment of a process.

    Returns
    -------
    dict of str to str
        The values of all ``NCCL_*`` and ``TORCH_NCCL_*`` by name, cleaned so that they can
        be recorded. Of a path only the last name is kept. Names of hosts and addresses
        within a value are replaced. A variable whose whole value is a host or an address
        has the value "(set)".

    Examples
    --------
    >>> nccl_variables({"NCCL_ALGO": "Ring", "NCCL_TOPO_FILE": "/opt/site/h200.xml",
    ...                 "NCCL_COMM_ID": "node17:4000", "PATH": "/bin"})
    {'NCCL_ALGO': 'Ring', 'NCCL_COMM_ID': '(set)', 'NCCL_TOPO_FILE': 'h200.xml'}
    """
    variables = {}
    for variable in sorted(environment):
        if not variable.startswith(("NCCL_", "TORCH_NCCL_")):
            continue
        value = environment[variable]
        if _NAMES_HOSTS.search(variable):
            variables[variable] = "(set)"
            continue
        # Addresses are replaced first, because a range of addresses has a slash, too.
        value = _without_hosts(value)
        # What follows the last slash: the last name of a path, or else the whole value.
        _, _, variables[variable] = value.rpartition("/")
    return variables


def own_nccl_variables() -> dict[str, str]:
    """Return the variables that NCCL obeys in this process, cleaned by `nccl_variables`.

    NCCL reads variables from the environment, from the file that NCCL_CONF_FILE names or
    else from ~/.nccl.conf, and at last from /etc/nccl.conf. If several of these set a
    variable, the first one counts.
    """
    users_file = os.environ.get("NCCL_CONF_FILE") or os.path.expanduser("~/.nccl.conf")
    variables: dict[str, str] = {}
    # The sources are read in the reverse order, so that an earlier one replaces the values
    # of a later one.
    for file in (NCCL_CONF, Path(users_file)):
        variables.update(parse_nccl_conf(content(file)))
    variables.update(os.environ)
    # Of all these variables, only those of NCCL are kept.
    return nccl_variables(variables)


NCCL_CONF = Path("/etc/nccl.conf")
"""Where an administrator sets NCCL's variables for all users of a machine."""


def parse_nccl_conf(text: str) -> dict[str, str]:
    r"""Return the variables in a configuration file of NCCL.

    Parameters
    ----------
    text : str
        Lines such as ``NCCL_ALGO=Ring``. Lines without "=" and comments, which begin with
        "#", are ignored.

    Returns
    -------
    dict of str to str
        The values by variable. If the text has a variable twice, the first line counts.

    Examples
    --------
    >>> parse_nccl_conf("# of this site\nNCCL_ALGO=Ring")
    {'NCCL_ALGO': 'Ring'}
    """
    variables: dict[str, str] = {}
    for line in text.splitlines():
        variable, equals, value = line.strip().partition("=")
        if equals and not variable.startswith("#"):
            variables.setdefault(variable.strip(), value.strip())
    return variables


# Addresses of IPv4, and of IPv6 with at least two colons, possibly with the length of a
# network behind them.
_ADDRESS = re.compile(
    r"(?<![\w.])(\d{1,3}(\.\d{1,3}){3}|[0-9a-f]*:[0-9a-f]*:[0-9a-f:]*)(/\d+)?(?![\w.])",
    re.IGNORECASE,
)
# A name of at least three parts that ends in letters, such as node17.site.edu.
_NAME_WITH_DOMAIN = re.compile(
    r"(?<![\w.])([\w-]+\.){2,}[a-z]{2,}(?![\w.])", re.IGNORECASE
)


def _without_hosts(text: str) -> str:
    """Return a text in which addresses and the names of hosts are replaced.

    The nodes of a cluster mostly differ in the digits of their names only. So every name
    is replaced that agrees with the name of this host in all but its digits. Other names
    are replaced if they have a domain, as in node17.site.edu.
    """
    text = _ADDRESS.sub("(address)", text)
    text = _NAME_WITH_DOMAIN.sub("(host)", text)
    short_name, _, _ = platform.node().partition(".")
    # If the name of this host were digits alone, every number would agree with it.
    if not re.search("[A-Za-z]", short_name):
        return text
    # Each group of digits in the name stands for any digits.
    pattern = re.sub(r"\d+", r"\\d+", re.escape(short_name))
    return re.sub(rf"(?<![A-Za-z0-9]){pattern}(?![A-Za-z0-9])", "(host)", text)


def _cudnn(cuda: str) -> str:
    """Return the version of cuDNN that torch uses, "none" if there is none.

    ``cuda`` is the version of CUDA that torch uses.
    """
    # Importing torch takes seconds, so only a torch that is already loaded is asked. Its
    # answer is None if it has no cuDNN.
    torch = sys.modules.get("torch")
    if torch is not None:
        return cudnn_version(torch.backends.cudnn.version() or 0)
    # The package of cuDNN is named after the major version of CUDA: nvidia-cudnn-cu12. If
    # ``cuda`` is "none", there is no package of that name, and the result is "none", too.
    major, _, _ = cuda.partition(".")
    # The package adds a fourth number for its own builds, as in 9.10.2.21, which is left
    # out.
    return ".".join(installed(f"nvidia-cudnn-cu{major}").split(".")[:3])


def cudnn_version(number: int) -> str:
    """Return the version that cuDNN means by a number, "none" for 0.

    The number is 10000 * major + 100 * minor + patch. Up to version 8 the first factor
    was 1000.

    Examples
    --------
    >>> cudnn_version(91002), cudnn_version(8907), cudnn_version(0)
    ('9.10.2', '8.9.7', 'none')
    """
    if not number:
        return "none"
    # Up to version 8 the minor version had one digit, and from version 9 on it has two.
    # Numbers of version 9 begin at 90000, and those of version 8 are less than 9000.
    of_major = 10_000 if number >= 90_000 else 1_000
    major, rest = divmod(number, of_major)
    minor, patch = divmod(rest, 100)
    return f"{major}.{minor}.{patch}"


def _cuda_and_nccl() -> tuple[str, str]:
    """Return the versions of CUDA and NCCL that torch uses, "none" if there is none.

    If torch is loaded already, the versions come from it. Otherwise they are read from
    its files, because importing torch takes seconds.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return _cuda_and_nccl_of_files()
    cuda = torch.version.cuda or "none"
    # Without torch.distributed, torch has no function that tells whether NCCL is there.
    has_nccl = (
        cuda != "none"
        and torch.distributed.is_available()
        and torch.distributed.is_nccl_available()
    )
    if not has_nccl:
        return cuda, "none"
    # torch gives the version of NCCL as a tuple of numbers.
    return cuda, ".".join(map(str, torch.cuda.nccl.version()))


def _cuda_and_nccl_of_files() -> tuple[str, str]:
    """Return the versions of CUDA and NCCL by the files of torch, which is not loaded.

    A version is "none" if it is absent, as both are for a torch without CUDA.
    """
    # Where torch lies, found without importing torch.
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return "none", "none"
    text = content(Path(spec.origin).with_name("version.py"))
    # The file has a line such as: cuda: Optional[str] = '12.8'
    version = re.search(r"^cuda\b.*=\s*'([\d.]+)'", text, re.MULTILINE)
    if not version:
        return "none", "none"
    # The package of NCCL is named after the major version of CUDA: nvidia-nccl-cu12.
    major, _, _ = version[1].partition(".")
    return version[1], installed(f"nvidia-nccl-cu{major}")
