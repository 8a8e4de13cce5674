"""``penstock doctor``: report what this machine and installation offer, what is missing or slow here, and why."""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import penstock
from penstock.base.control_groups import cpu_quota
from penstock.base.errors import PenstockError
from penstock.base.flag_values import local_path
from penstock.base.integrations import EXTRAS
from penstock.base.threads import num_threads
from penstock.cli.command_line import Parser, make_devices
from penstock.cli.compile_cache import SETTING, compile_cache
from penstock.cli.output import Output, count, nearest

EXAMPLE = "penstock doctor --checkpoint run1"
NEEDED = ("jax", "jaxlib", "numpy", "pyarrow", "protobuf")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MOUNTS = Path("/proc/self/mounts")

REMOTE = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "ceph", "glusterfs", "lustre")
IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    found : what the check found, as text
    advice : the consequence for speed or durability, and what to do; "" if there is nothing to do
    broken : penstock cannot run
    """

    name: str
    found: str
    advice: str = ""
    broken: bool = False


def add(command: Parser) -> None:
    command.add_argument(
        "--checkpoint",
        type=local_path,
        default=Path(),
        metavar="DIR",
        help="look at the file system there (default: the current directory)",
    )


def run(args: argparse.Namespace, out: Output) -> int:
    findings = list(examine(args.checkpoint))
    for finding in findings:
        out.say(f"{finding.name:14} {finding.found}")
        if finding.advice:
            out.say(f"{'':14} {'BROKEN' if finding.broken else 'note'}: {finding.advice}")
    broken = any(finding.broken for finding in findings)
    out.result({"passed": not broken, "findings": [asdict(finding) for finding in findings]})
    return int(broken)


def examine(place: Path) -> Iterator[CheckResult]:
    """Yield the finding of every check, in the order of the report. place : the directory for checkpoints"""
    libraries = versions()
    yield libraries
    yield from extras()
    yield compiler()
    if libraries.broken:  # the other checks import them
        return
    yield devices()
    from penstock.pyx.accumulator import targets  # here, so that what stands above is printed where kernels cannot load

    yield kernels(targets())
    yield threads(num_threads(None), cpu_quota())
    yield memory()
    yield huge_pages(HUGE_PAGES.read_text() if HUGE_PAGES.exists() else "")
    yield cache(compile_cache())
    yield file_system(place, MOUNTS.read_text() if MOUNTS.exists() else "")


def versions() -> CheckResult:
    """Report the versions of penstock and of the libraries that it cannot do without."""
    specifiers, packages, absent, unsupported = supported(), [], [], []
    for name in NEEDED:
        try:
            packages.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            absent.append(name)
            continue
        specifier = specifiers.get((name, ""), "")
        if not satisfies(version(name), specifier):
            unsupported.append(f"{packages[-1]} is not supported, {name}{specifier} is")
    system = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    found = ", ".join([f"penstock {penstock.__version__}", *packages, system])
    if absent:
        return CheckResult("versions", found, f"{' and '.join(absent)} missing: pip install penstock", broken=True)
    return CheckResult("versions", found, f"{'; '.join(unsupported)}: pip install penstock" if unsupported else "")


def extras() -> Iterator[CheckResult]:
    """Yield the installed extras, then those of an unsupported version and the missing ones, each with its purpose."""
    specifiers, present, others = supported(), [], []
    for extra in EXTRAS:
        command = f"pip install 'penstock[{extra.name}]'"
        try:
            installed = version(extra.package)
        except PackageNotFoundError:
            others.append(CheckResult("missing", f"for {extra.purpose}: {command}"))
            continue
        present.append(f"{extra.package} {installed}")
        specifier = specifiers.get((extra.package, extra.name), "")
        if not satisfies(installed, specifier):
            found = f"{present[-1]}, not {extra.package}{specifier}, for {extra.purpose}: {command}"
            others.append(CheckResult("unsupported", found))
    yield CheckResult("optional", ", ".join(present) or "none")
    yield from others


def supported() -> dict[tuple[str, str], str]:
    """Return (package, extra or "") → its supported versions, such as ``<8,>=6.31.1``, from penstock's metadata."""
    try:
        requirements = requires("penstock") or []
    except PackageNotFoundError:  # a source tree that is on the path, and not installed
        return {}
    parts = (re.match(r"""([\w.-]+)(?:\[.*?\])?([^;]*)(?:;.*extra == ["']([\w-]+))?""", text) for text in requirements)
    return {(match[1], match[3] or ""): match[2].strip() for match in parts if match}


def satisfies(installed: str, specifier: str) -> bool:
    """Return whether a version lies within bounds, such as ``<8,>=6.31.1``."""
    bounds = re.findall(r"(>=|<)([\d.]+)", specifier)
    return all((release(installed) < release(bound)) == (sign == "<") for sign, bound in bounds)


def release(text: str) -> list[int]:
    """Return the numbers of a version, without zeros at its end and without what follows them, such as ``+cpu``."""
    numbers = [int(number) for number in re.findall(r"\d+", re.split(r"[^\d.]", text)[0])]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return numbers


def compiler() -> CheckResult:
    """Report what a build from source needs. A wheel needs none of it."""
    command = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    executable = shutil.which(command.split()[0])
    header = Path(sysconfig.get_path("include"), "Python.h")
    missing = [
        *([] if executable else ["a C compiler"]),
        *([] if header.exists() else [f"Python's headers ({header})"]),
    ]
    absent = f"missing for a build from source: {' and '.join(missing)}"
    return CheckResult("compiler", absent if missing else f"{executable}, with Python's headers")


def devices() -> CheckResult:
    """Report the devices of tables, and which variant updates them; on a TPU, run the kernel's canaries."""
    from penstock.rows.bridge.devices import reason_of
    from penstock.rows.bridge.mesh_selection import MISSED  # here, because kernels may not load

    try:
        mesh = make_devices(None)
        variants, problems = variants_of(mesh)
    except PenstockError as error:
        return CheckResult("devices", "none", str(error), broken=True)
    all_of = list(mesh.devices.flat)
    reason = reason_of(mesh)
    description = f"{len(all_of)} {all_of[0].platform} ({reason or all_of[0].device_kind}), steps by {variants}"
    description += sparsecores(mesh)
    advice = ""
    if problems:
        advice = f"the kernel failed its canary, so XLA's program updates: {problems}"
    elif MISSED in reason:
        advice = "tables do not use the accelerator: install jax for it: jax[cuda12] or jax[tpu]"
    return CheckResult("devices", description, advice)


def variants_of(mesh: Any) -> tuple[str, str]:
    """Return the variant of each main optimizer's tables, and the failures of their canaries.

    One dim serves for all up to 128: on a TPU such tables have the same lines.
    """
    from penstock.rows.bridge import backends
    from penstock.rows.bridge.sharding import Layout

    by_variant: dict[str, list[str]] = {}
    problems = []
    for optimizer in (penstock.SGD(0.1), penstock.Adagrad(0.1), penstock.Adam(0.1), penstock.FTRL(0.1)):
        name = type(optimizer).__name__
        (spec,) = penstock.EmbeddingConfig.from_tables([penstock.TableConfig(1024, 128, optimizer=optimizer)]).tables
        layout = Layout(name, 1024, 128, len(spec.slots), mesh.size, False, backends.lanes(mesh))
        variant, problem = backends.choose(mesh, layout, spec.rule)
        by_variant.setdefault(variant, []).append(name)
        problems += [f"{name}: {problem}"] if problem else []
    several = (f"'{variant}' ({', '.join(names)})" for variant, names in by_variant.items())
    return " and ".join(several), "; ".join(problems)


def sparsecores(mesh: Any) -> str:
    """Return whether the variant for SparseCores works on these devices; "" if they have none."""
    from penstock.rows.bridge import backends
    from penstock.rows.bridge.sharding import Layout
    from penstock.rows.bridge.variants import kernel

    rule = penstock.updates.update_rule(penstock.Adagrad(0.1))
    layout = Layout("t", 1024, 32, 1, mesh.size, False, backends.lanes(mesh))
    if not backends.possible("sparsecore", mesh, layout, rule):
        return ""
    variant, problem = backends.choose(mesh, layout, rule, preferred="sparsecore")
    if problem:
        return f"; SparseCores fail their canary: {problem}"
    if variant != "sparsecore":
        return ""
    root = (
        ""
        if kernel("sparsecore").has_root()
        else ", with roots in software: jax 0.11, which needs Python 3.12, has them"
    )
    return f"; SparseCores work if requested (variant 'sparsecore'){root}"


def kernels(able: list[str]) -> CheckResult:
    """Report the instruction set in use. Results do not depend on it; speed does.

    able : the instruction sets that the kernels were compiled for and this CPU supports, best first
    """
    plain = len(able) == 1 and platform.machine() in ("x86_64", "AMD64")
    advice = "this CPU, or the virtual machine's model of it, has no AVX2: sums and updates are slower" if plain else ""
    return CheckResult("kernels", f"{able[0]} (of {', '.join(able)})", advice)


def threads(usable: int, quota: float | None = None) -> CheckResult:
    """Report how many threads work. quota : CPUs that the control groups of this process grant it; None: no limit"""
    advice = "" if usable > 1 else "with one CPU, reading, sums and steps take turns: give the process more"
    limit = "" if quota is None else f"; its control group has a quota of {quota:g}"
    return CheckResult("threads", f"{usable} of {os.cpu_count()} CPUs are ours{limit}", advice)


def memory() -> CheckResult:
    """Report the host's memory, which holds tables on a CPU."""
    page = os.sysconf("SC_PAGE_SIZE")
    has, free = (page * os.sysconf(name) / 1e9 for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    return CheckResult("memory", f"{has:.1f} GB, {free:.1f} GB of it unused")


def huge_pages(setting: str) -> CheckResult:
    """Report the setting of transparent huge pages. setting : text such as ``always [madvise] never``"""
    chosen = setting.partition("[")[2].partition("]")[0]
    if chosen in ("always", "madvise"):
        return CheckResult("huge pages", chosen)
    advice = "tables of gigabytes are slower in small pages"
    if chosen == "never":
        advice += f": as root, echo madvise > {HUGE_PAGES}"
    return CheckResult("huge pages", chosen or "unknown", advice)


def cache(folder: Path | None) -> CheckResult:
    """Report the cache of JAX's compiled programs."""
    outside = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if outside and Path(outside) != folder:
        return CheckResult("compile cache", f"{outside} (JAX_COMPILATION_CACHE_DIR)")
    if folder is None:
        return CheckResult(
            "compile cache", "off", f"every command compiles its programs anew: unset {SETTING}, or set HOME"
        )
    kept = [path.stat().st_size for path in folder.glob("*-cache")] if folder.is_dir() else []
    contents = f"{folder}, {count(len(kept))} programs, {count(sum(kept))} bytes"
    advice = ""
    if not os.access(nearest(folder), os.W_OK):
        advice = f"it cannot be written, so every command compiles anew: set {SETTING}=DIR"
    return CheckResult("compile cache", contents, advice)


def file_system(place: Path, mounts: str) -> CheckResult:
    """Report the file system of a checkpoint in ``place``. mounts : the text of /proc/self/mounts"""
    there = nearest(place)
    kind, free = mount_of(there.resolve(), mounts), shutil.disk_usage(there).free / 1e9
    advice = ""
    if kind in IN_MEMORY:
        advice = "it lives in memory: a checkpoint there is lost with the machine, and takes memory from the tables"
    elif kind in REMOTE:
        advice = (
            "it is on another machine: a commit waits for the network, and what a crash leaves is the server's word"
        )
    elif not os.access(there, os.W_OK):
        advice = "it cannot be written to: give another directory"
    return CheckResult("checkpoints", f"{place}: {kind or 'unknown file system'}, {free:.1f} GB free", advice)


def mount_of(path: Path, mounts: str) -> str:
    """Return the type of the file system of a path; "" if unknown."""
    kinds = {}
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) > 2:
            kinds[Path(fields[1].replace("\\040", " "))] = fields[2]  # the last mount on a directory hides earlier ones
    return next((kinds[p] for p in (path, *path.parents) if p in kinds), "")
