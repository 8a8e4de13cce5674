"""The folder map and the kernels; pyproject.toml contains the rest of the package's configuration.

``engine/`` is imported as ``penstock``, ``io/`` as ``penstock.io``, ``pyx/`` as ``penstock.pyx``.
PENSTOCK_CHECKED=1 builds the kernels with bounds checks (``make checked``). PENSTOCK_OPTIMIZE replaces -O3 -g0 in
sanitizer builds (``make sanitize``, ``make tsan``), because the flags below override those in CFLAGS. PENSTOCK_PROGRESS
is a file to write to how many kernels are compiled: pip shows nothing of a build before it ends (``make demo``).
"""

import contextlib
import gzip
import multiprocessing
import os
import re
import shutil
import sys
import sysconfig
import tarfile
import threading
import time
import tomllib
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, find_packages, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
CHECKED = os.environ.get("PENSTOCK_CHECKED", "") not in ("", "0")

CPUS = os.cpu_count() or 1

if "CC" not in os.environ and shutil.which("ccache"):
    os.environ["CC"] = f"ccache {sysconfig.get_config_var('CC') or 'cc'}"

# Package → folder; those below them have the names of their folders.
PACKAGE_DIR = {"penstock": "engine", "penstock.bench": "bench", "penstock.io": "io", "penstock.pyx": "pyx"}
# What only developers run, from the repository, is in no wheel.
DEVELOPERS = ("tpu", "gpu")
PACKAGES = [
    *PACKAGE_DIR,
    *(
        f"{root}.{name}"
        for root, folder in PACKAGE_DIR.items()
        for name in find_packages(str(ROOT / folder), exclude=DEVELOPERS if folder == "bench" else ())
    ),
]

# Listed by name, never by a glob: from an sdist without the .pyx files, a glob would silently build a wheel without
# kernels.
KERNELS = [
    "accumulator",
    "buffer_pool",
    "coalesce",
    "coded_rows",
    "dirty_bits",
    "frame_accumulate",
    "frame_steps",
    "gate_counts",
    "gradient_blocks",
    "id_table",
    "initial_rows",
    "locked_calls",
    "norms",
    "partition",
    "plain_batches",
    "row_keys",
    "row_reads",
    "row_sums",
    "row_updates",
    "update",
    "keys.directory",
    "keys.directory_plan",
    "keys.key_lookup",
    "keys.key_owners",
    "keys.key_shards",
    "keys.shard_decisions",
    "keys.shard_sample",
]
MODULES = {f"penstock.pyx.{kernel}": f"pyx/{kernel.replace('.', '/')}.pyx" for kernel in KERNELS}
MODULES["penstock.bench.memory_bandwidth"] = "bench/memory_bandwidth.pyx"

# Cython's own code for memoryviews, generated and compiled once for all kernels: it is most of the C code of a module.
# Cython also lists such a module by its last name alone, among those of all packages.
SHARED_CODE = "penstock.pyx.penstock_cython"

# -g0: Python's own flags ask for debugging information, which takes a quarter of the compiler's time.
# Sums must round the same on every machine: no contraction to FMA, no -march=native.
# The kernels read neither errno nor floating-point traps: without them square roots and selections vectorize, with
# the same bits. (Never -ffast-math.)
COMPILE_ARGS = [
    *os.environ.get("PENSTOCK_OPTIMIZE", "-O3 -g0").split(),
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
]

HEADERS = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("pyx/**/*.h"))]


def link_tree() -> str:
    """Lay out the import names as relative symlinks, for Cython (cimport), mypy and editors."""
    tree = ROOT / "build" / "tree" / "penstock"
    tree.mkdir(parents=True, exist_ok=True)
    wanted = {p.name: p for p in (ROOT / "engine").iterdir() if p.name != "__pycache__"}
    wanted |= {"bench": ROOT / "bench", "io": ROOT / "io", "pyx": ROOT / "pyx"}
    for link in tree.iterdir():
        if link.is_symlink() and link.name not in wanted:
            link.unlink()
    for name, target in wanted.items():
        link = tree / name
        if not link.is_symlink():
            link.symlink_to(os.path.relpath(target, tree))
    return str(tree.parent)


def description() -> str:
    """README for the page of a package index: links into docs/ lead to this version's site, others to the source."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    version = re.findall(r'__version__ = "(.*)"', (ROOT / "engine" / "__init__.py").read_text())[0]
    text = (ROOT / "README.md").read_text().replace("/index.md", "/")
    text = re.sub(r"(\]\(docs/[^)]*)\.md", r"\1/", text)
    text = text.replace("](docs/", f"]({urls['Documentation']}/{version}/")
    return re.sub(r"\]\((?!https:)", f"]({urls['Source']}/", text)


def say(text: str) -> None:
    if place := os.environ.get("PENSTOCK_PROGRESS"):
        with contextlib.suppress(OSError), open(place, "a") as progress:
            progress.write(f"{text}\n")


class BuildWithProgress(build_ext):
    """Compiles the kernels on every CPU, the largest first, and reports how many are done and the seconds of each.

    pip would compile those of an editable installation in a folder that it removes: it uses that of ``build_ext
    --inplace``, so that neither compiles what the other has compiled.
    """

    num_done, counting = 0, threading.Lock()

    def finalize_options(self) -> None:
        super().finalize_options()
        # Not an option of the distribution: setuptools forgets those for an editable installation.
        self.parallel = self.parallel or CPUS

    def run(self) -> None:
        if self.editable_mode:
            folders = build(self.distribution)
            folders.ensure_finalized()
            self.build_lib, self.build_temp = folders.build_lib, folders.build_temp
        super().run()

    def build_extensions(self) -> None:
        self.extensions.sort(key=lambda ext: os.path.getsize(ext.sources[0]), reverse=True)
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        start_s = time.monotonic()
        super().build_extension(ext)
        with self.counting:
            self.num_done += 1
            seconds = f"{ext.name.removeprefix('penstock.')} in {time.monotonic() - start_s:.1f} s"
            say(f"compiled {self.num_done} of {len(self.extensions)} kernels: {seconds}")


class ReproducibleSdist(sdist):
    """With SOURCE_DATE_EPOCH the same files are the same bytes: without owners, all from that moment. (Wheels are.)"""

    def make_archive(self, base_name: str, kind: str, **keywords) -> str:
        moment = int(os.environ.get("SOURCE_DATE_EPOCH", "-1"))
        if kind != "gztar" or moment < 0:
            return super().make_archive(base_name, kind, **keywords)

        def anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
            entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = moment, 0, 0, "", ""
            entry.mode = 0o755 if entry.mode & 0o100 else 0o644
            return entry

        path = f"{base_name}.tar.gz"
        with (
            open(path, "wb") as file,
            gzip.GzipFile("", "wb", fileobj=file, mtime=moment) as compressed,
            tarfile.open(fileobj=compressed, mode="w") as archive,
        ):
            archive.add(keywords["base_dir"], filter=anonymous)
        return path


BUILD_DIR = "build/checked" if CHECKED else "build/release"
if not (ROOT / BUILD_DIR).exists():  # pip runs this file several times
    say(f"translating {len(MODULES)} kernels to C")
setup(
    cmdclass={"build_ext": BuildWithProgress, "sdist": ReproducibleSdist},
    long_description=description(),
    long_description_content_type="text/markdown",
    packages=PACKAGES,
    package_dir=PACKAGE_DIR,
    include_package_data=False,  # MANIFEST.in is for the sdist
    package_data={
        "penstock": ["py.typed", "*.pyi"],
        "penstock.bench": ["*.pyi"],
        "penstock.contrib.pages": ["*.html"],
        "penstock.model.config": ["*.proto", "*.pyi"],
        "penstock.pyx": ["*.pyi"],
        "penstock.pyx.keys": ["*.pyi"],
    },
    ext_modules=cythonize(
        [
            Extension(name, [path], include_dirs=["pyx"], depends=HEADERS, extra_compile_args=COMPILE_ARGS)
            for name, path in {SHARED_CODE: "pyx/penstock_cython.c", **MODULES}.items()
        ],
        shared_utility_qualified_name=SHARED_CODE,
        include_path=[link_tree()],
        quiet="-q" in sys.argv,
        nthreads=CPUS if multiprocessing.get_start_method() == "fork" else 0,  # spawned workers would run this file
        build_dir=BUILD_DIR,
        compiler_directives={
            "language_level": 3,
            "embedsignature": True,
            "boundscheck": CHECKED,
            "wraparound": CHECKED,
            "initializedcheck": CHECKED,
            # The kernels never divide negative ids, indices or sizes.
            "cdivision": True,
        },
    ),
)
