#!/usr/bin/env bash
# Builds the kernels with AddressSanitizer and UndefinedBehaviorSanitizer into build/asan, and runs with them every
# test that needs neither jax nor pyarrow nor a process, shapes.py and updates.py: `make sanitize`.
#   tests/support/sanitize/asan.sh PYTHON [--break overrun|overflow] [pytest arguments]
# Exit code 0: nothing was reported; 66: something was, in full on stderr.
set -euo pipefail
cd "$(dirname "$0")/../../.."
python=$1
shift
library=$("${CC:-cc}" -print-file-name=libasan.so)
undefined=$("${CC:-cc}" -print-file-name=libubsan.so)
for file in "$library" "$undefined"; do
    [ -e "$file" ] || { echo "sanitize: this compiler has no libasan and libubsan (Debian: apt install gcc)" >&2; exit 1; }
done

# -O1 -g: reports name lines, and the compiler is done in reasonable time. The package is copied, so that nothing of the
# checkout's own build is loaded. A kernel's report ends the process; leaks are Python's own at its end.
flags="-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g"
export PENSTOCK_OPTIMIZE=-O1 CFLAGS="$flags" LDFLAGS="-fsanitize=address,undefined"
build() { "$python" "$@" >build/asan.log 2>&1 || { cat build/asan.log >&2; exit 1; }; }
mkdir -p build
build setup.py -q build --build-base build/asan --build-lib build/asan/lib
build tests/support/sanitize/broken_setup.py -q build_ext --build-temp build/asan/temp --build-lib build/asan/broken
unset PENSTOCK_OPTIMIZE CFLAGS LDFLAGS

# PYTHONMALLOC=malloc: every array lies in memory of its own, with a guarded zone behind it.
watched() {
    env LD_PRELOAD="$library $undefined" PYTHONPATH=build/asan/lib:build/asan/broken:tests/support PYTHONMALLOC=malloc \
        ASAN_OPTIONS="exitcode=66:detect_leaks=0:allocator_may_return_null=1" \
        UBSAN_OPTIONS="exitcode=66:print_stacktrace=1" "$python" "$@"
}
if [ "${1:-}" = --break ]; then
    watched -c "import sys, broken; getattr(broken, sys.argv[1])()" "$2"
    exit
fi
watched tests/support/sanitize/shapes.py
watched tests/support/sanitize/updates.py
# Tests of the configuration reach no kernel, nor do those of integrations but accumulators.
# shellcheck disable=SC2046 # no name holds a space
watched -m pytest -q --noconftest -p sanitize.alone -p no:cacheprovider "$@" \
    $(find tests -name 'test_*.py' ! -name 'test_config*' ! -name 'test_lint_*' ! -path 'tests/contrib/[!a]*' |
        sort | xargs grep -LE '\b(jax|pyarrow)\b|subprocess')
