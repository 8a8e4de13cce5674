/* A parallel loop inside one FFI handler, on the threads of XLA's own pool.
 *
 * Items (numbered pieces of work) are taken with an atomic counter, by any thread: the handler's own
 * thread takes part, and when no item is left it waits only for those already taken, never for a task
 * that has not started; the pool may be busy with other handlers that wait likewise. A task that starts
 * late finds the loop alive (counted references), no item left, and goes.
 *
 * XLA's threads flush subnormal numbers to zero. Work runs with the default floating-point environment
 * instead, and the thread gets its own back.
 */
#ifndef PENSTOCK_PARALLEL_FOR_H
#define PENSTOCK_PARALLEL_FOR_H

#include <fenv.h>
#include <pthread.h>
#include <stdlib.h>

#include "xla_ffi.h"

typedef void (*LoopBody)(void *context, int64_t item);

typedef struct {
    LoopBody work;
    void *context;
    int64_t num_items;
    int64_t next;     /* atomic: the first free item */
    int64_t finished; /* under the lock */
    int references;   /* atomic */
    pthread_mutex_t lock;
    pthread_cond_t done;
} Loop;

static inline void loop_release(Loop *loop) {
    if (__atomic_sub_fetch(&loop->references, 1, __ATOMIC_ACQ_REL) == 0) {
        pthread_cond_destroy(&loop->done);
        pthread_mutex_destroy(&loop->lock);
        free(loop);
    }
}

static inline void loop_take_part(Loop *loop) {
    int64_t item, finished = 0;
    fenv_t before;
    fegetenv(&before);
    fesetenv(FE_DFL_ENV);
    while ((item = __atomic_fetch_add(&loop->next, 1, __ATOMIC_RELAXED)) < loop->num_items) {
        loop->work(loop->context, item);
        finished++;
    }
    fesetenv(&before);
    if (finished) {
        pthread_mutex_lock(&loop->lock);
        loop->finished += finished;
        if (loop->finished == loop->num_items) pthread_cond_signal(&loop->done);
        pthread_mutex_unlock(&loop->lock);
    }
}

static void loop_task(void *loop) {
    loop_take_part((Loop *)loop);
    loop_release((Loop *)loop);
}

/* work(context, item) for every item below num_items, each once, on at most max_threads threads. */
static inline void parallel_for(const XLA_FFI_CallFrame *frame, int64_t max_threads, int64_t num_items, LoopBody work,
                            void *context) {
    int64_t helpers = num_items > 1 && max_threads != 1 ? ffi_num_threads(frame) : 1;
    if (max_threads > 0 && helpers > max_threads) helpers = max_threads;
    if (helpers > num_items) helpers = num_items;
    helpers -= 1;
    Loop *loop = helpers > 0 ? (Loop *)calloc(1, sizeof(Loop)) : NULL;
    if (loop == NULL) { /* a small step, or no memory for a loop: all of it here */
        fenv_t before;
        fegetenv(&before);
        fesetenv(FE_DFL_ENV);
        for (int64_t item = 0; item < num_items; item++) work(context, item);
        fesetenv(&before);
        return;
    }
    loop->work = work;
    loop->context = context;
    loop->num_items = num_items;
    loop->references = 1;
    pthread_mutex_init(&loop->lock, NULL);
    pthread_cond_init(&loop->done, NULL);
    while (helpers-- > 0) {
        __atomic_add_fetch(&loop->references, 1, __ATOMIC_RELAXED);
        if (!ffi_schedule(frame, loop_task, loop)) {
            loop_release(loop);
            break;
        }
    }
    loop_take_part(loop);
    pthread_mutex_lock(&loop->lock);
    while (loop->finished < num_items) pthread_cond_wait(&loop->done, &loop->lock);
    pthread_mutex_unlock(&loop->lock);
    loop_release(loop);
}

#endif
