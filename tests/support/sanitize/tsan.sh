#!/usr/bin/env bash
# Builds the kernels with ThreadSanitizer into build/tsan and drives them from threads: `make tsan`.
#   tests/support/sanitize/tsan.sh PYTHON [--break gate|parts|rows|seqlock]
# Exit code 0: no race was reported; 66: at least one was, in full on stderr.
set -euo pipefail
cd "$(dirname "$0")/../../.."
python=$1
shift
library=$("${CC:-cc}" -print-file-name=libtsan.so)
[ -e "$library" ] || { echo "tsan: this compiler has no libtsan (Debian: apt install libtsan2 or gcc)" >&2; exit 1; }

# -O1 -g: reports name lines, and the compiler is done in reasonable time. The package is copied, so that nothing of the
# checkout's own build is loaded.
export PENSTOCK_OPTIMIZE=-O1 CFLAGS="-fsanitize=thread -g" LDFLAGS="-fsanitize=thread"
build() { "$python" "$@" >build/tsan.log 2>&1 || { cat build/tsan.log >&2; exit 1; }; }
mkdir -p build
build setup.py -q build --build-base build/tsan --build-lib build/tsan/lib
build tests/support/sanitize/broken_setup.py -q build_ext --build-temp build/tsan/temp --build-lib build/tsan/broken
unset PENSTOCK_OPTIMIZE CFLAGS LDFLAGS

# ThreadSanitizer wants its shadow memory at fixed addresses, which a randomized layout may occupy.
still=()
if setarch -R true 2>/dev/null; then still=(setarch -R); fi
halt=0
[ $# -eq 0 ] || halt=1  # something is broken on purpose: one report is enough
watched() {
    "${still[@]}" env LD_PRELOAD="$library" PYTHONPATH=build/tsan/lib:build/tsan/broken:tests/support \
        TSAN_OPTIONS="exitcode=66 halt_on_error=$halt history_size=7 suppressions=tests/support/sanitize/tsan_suppressions.txt" \
        "$python" "$@"
}
case "${2:-all}" in all | gate | parts) watched tests/support/sanitize/threads.py "$@" ;; esac
case "${2:-all}" in all | rows) watched tests/support/sanitize/updates.py "$@" ;; esac
case "${2:-all}" in all | seqlock) watched tests/support/sanitize/reads.py "$@" ;; esac
