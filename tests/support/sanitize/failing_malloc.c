/* Preloaded, lets the n-th large allocation of the process fail, after allocations.py has armed it.

   Counts malloc, calloc, realloc, posix_memalign and anonymous mmap of at least so many bytes: what kernels and NumPy
   take memory with. Armed and read under the interpreter's lock; the counter is atomic for kernels' own threads. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static atomic_long counted;
static long failing; /* 0: nothing is counted */
static size_t least;

void failing_arm(long number, size_t num_bytes) {
    least = num_bytes;
    atomic_store(&counted, 0);
    failing = number;
}

/* How many were asked for since it was armed. */
long failing_disarm(void) {
    failing = 0;
    return atomic_load(&counted);
}

static int refused(size_t num_bytes) {
    return failing && num_bytes >= least && atomic_fetch_add(&counted, 1) + 1 == failing;
}

/* glibc's own names, so that nothing has to be looked up while dlsym itself allocates. */
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

static void *none(void) {
    errno = ENOMEM;
    return NULL;
}

void *malloc(size_t size) { return refused(size) ? none() : __libc_malloc(size); }

void *calloc(size_t number, size_t size) { return refused(number * size) ? none() : __libc_calloc(number, size); }

void *realloc(void *memory, size_t size) { return refused(size) ? none() : __libc_realloc(memory, size); }

int posix_memalign(void **memory, size_t alignment, size_t size) {
    if (refused(size) || !(*memory = __libc_memalign(alignment, size)))
        return ENOMEM;
    return 0;
}

void *mmap(void *at, size_t size, int protection, int flags, int file, off_t offset) {
    if (flags & MAP_ANONYMOUS && refused(size)) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    return (void *)syscall(SYS_mmap, at, size, protection, flags, file, offset);
}
