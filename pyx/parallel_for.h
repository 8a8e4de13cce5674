/* A parallel loop inside one FFI handler, on the threads of XLA's own pool.
 *
 * Claims (numbered pieces of work) are taken with an atomic counter, by any thread: the handler's own
 * thread takes part, and when no claim is left it waits only for those already taken, never for a task
 * that has not started; the pool may be busy with other handlers that wait likewise. A task that starts
 * late finds the crew alive (counted references), no claim left, and goes.
 *
 * XLA's threads flush subnormal numbers to zero. Work runs with the default floating-point environment
 * instead, and the thread gets its own back.
 */
#ifndef PENSTOCK_CREW_H
#define PENSTOCK_CREW_H

#include <fenv.h>
#include <pthread.h>
#include <stdlib.h>

#include "xla_ffi.h"

typedef void (*CrewWork)(void *context, int64_t claim);

typedef struct {
    CrewWork work;
    void *context;
    int64_t num_claims;
    int64_t next;     /* atomic: the first free claim */
    int64_t finished; /* under the lock */
    int references;   /* atomic */
    pthread_mutex_t lock;
    pthread_cond_t done;
} Crew;

static inline void crew_release(Crew *crew) {
    if (__atomic_sub_fetch(&crew->references, 1, __ATOMIC_ACQ_REL) == 0) {
        pthread_cond_destroy(&crew->done);
        pthread_mutex_destroy(&crew->lock);
        free(crew);
    }
}

static inline void crew_take_part(Crew *crew) {
    int64_t claim, finished = 0;
    fenv_t before;
    fegetenv(&before);
    fesetenv(FE_DFL_ENV);
    while ((claim = __atomic_fetch_add(&crew->next, 1, __ATOMIC_RELAXED)) < crew->num_claims) {
        crew->work(crew->context, claim);
        finished++;
    }
    fesetenv(&before);
    if (finished) {
        pthread_mutex_lock(&crew->lock);
        crew->finished += finished;
        if (crew->finished == crew->num_claims) pthread_cond_signal(&crew->done);
        pthread_mutex_unlock(&crew->lock);
    }
}

static void crew_task(void *crew) {
    crew_take_part((Crew *)crew);
    crew_release((Crew *)crew);
}

/* work(context, claim) for every claim below num_claims, each once, on at most max_threads threads. */
static inline void crew_run(const XLA_FFI_CallFrame *frame, int64_t max_threads, int64_t num_claims, CrewWork work,
                            void *context) {
    int64_t helpers = num_claims > 1 && max_threads != 1 ? ffi_num_threads(frame) : 1;
    if (max_threads > 0 && helpers > max_threads) helpers = max_threads;
    if (helpers > num_claims) helpers = num_claims;
    helpers -= 1;
    Crew *crew = helpers > 0 ? (Crew *)calloc(1, sizeof(Crew)) : NULL;
    if (crew == NULL) { /* a small step, or no memory for a crew: all of it here */
        fenv_t before;
        fegetenv(&before);
        fesetenv(FE_DFL_ENV);
        for (int64_t claim = 0; claim < num_claims; claim++) work(context, claim);
        fesetenv(&before);
        return;
    }
    crew->work = work;
    crew->context = context;
    crew->num_claims = num_claims;
    crew->references = 1;
    pthread_mutex_init(&crew->lock, NULL);
    pthread_cond_init(&crew->done, NULL);
    while (helpers-- > 0) {
        __atomic_add_fetch(&crew->references, 1, __ATOMIC_RELAXED);
        if (!ffi_schedule(frame, crew_task, crew)) {
            crew_release(crew);
            break;
        }
    }
    crew_take_part(crew);
    pthread_mutex_lock(&crew->lock);
    while (crew->finished < num_claims) pthread_cond_wait(&crew->done, &crew->lock);
    pthread_mutex_unlock(&crew->lock);
    crew_release(crew);
}

#endif
