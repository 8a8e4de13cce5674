"""Calls XLA's handlers as XLA does, without XLA: call frames, a pool of threads, errors. For the sanitizers.

The pool can be late (a task runs when the handler has returned already), can refuse tasks, and can fail to say
how many threads it has; a handler must bear all of it.
"""

from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport int64_t


cdef extern from *:
    """
    #include <pthread.h>
    #include <stdio.h>
    #include <stdlib.h>
    #include "xla_ffi.h"

    enum { MOST_TASKS = 64 };
    struct FfiError { int code; char message[200]; };
    typedef struct { void (*task)(void *); void *given; } FakeTask;
    struct FfiContext {
        int64_t num_threads;
        int late, refusing, silent, num_tasks;
        FakeTask tasks[MOST_TASKS];
        pthread_t threads[MOST_TASKS];
    };

    static FfiError *fake_create(FfiErrorCreate *args) {
        FfiError *error = (FfiError *)malloc(sizeof(FfiError));
        error->code = args->code;
        snprintf(error->message, sizeof error->message, "%s", args->message);
        return error;
    }
    static void fake_destroy(FfiErrorDestroy *args) { free(args->error); }
    static FfiError *fake_error(void) {
        FfiErrorCreate args = {sizeof args, NULL, "no", FFI_INTERNAL};
        return fake_create(&args);
    }
    static void *fake_thread(void *given) {
        FakeTask *task = (FakeTask *)given;
        task->task(task->given);
        return NULL;
    }
    static FfiError *fake_schedule(FfiSchedule *args) {
        FfiContext *c = args->context;
        if (c->num_tasks == MOST_TASKS || (c->refusing && c->num_tasks >= c->refusing - 1))
            return fake_error();
        FakeTask *task = &c->tasks[c->num_tasks];
        task->task = args->task, task->given = args->data;
        if (!c->late && pthread_create(&c->threads[c->num_tasks], NULL, fake_thread, task))
            return fake_error();
        c->num_tasks++;
        return NULL;
    }
    static FfiError *fake_num_threads(FfiNumThreads *args) {
        if (args->context->silent)
            return fake_error();
        *args->num_threads = args->context->num_threads;
        return NULL;
    }

    static FfiBuffer fake_buffer(void *memory, int dtype, int64_t rank, int64_t *dims) {
        FfiBuffer buffer = {sizeof buffer, NULL, dtype, memory, rank, dims};
        return buffer;
    }

    /* A call with up to two arguments and one result. Returns the error, or NULL. */
    static FfiError *fake_call(void *handler, FfiContext *c, FfiBuffer **args, int num_args, FfiBuffer **rets, int num_rets,
                               int stage) {
        FfiApi api;
        memset(&api, 0, sizeof api);
        api.struct_size = sizeof api;
        api.create_error = fake_create, api.destroy_error = fake_destroy;
        api.schedule = fake_schedule, api.num_threads = fake_num_threads;
        FfiFrame frame;
        memset(&frame, 0, sizeof frame);
        frame.struct_size = sizeof frame, frame.api = &api, frame.context = c, frame.stage = stage;
        frame.args.size = num_args, frame.args.buffers = args;
        frame.rets.size = num_rets, frame.rets.buffers = rets;
        FfiError *error = ((FfiError *(*)(FfiFrame *))handler)(&frame);
        for (int n = 0; c->late && n < c->num_tasks; n++)
            pthread_create(&c->threads[n], NULL, fake_thread, &c->tasks[n]);
        for (int n = 0; n < c->num_tasks; n++)
            pthread_join(c->threads[n], NULL);
        return error;
    }

    /* What a handler says of its version. */
    static int fake_version(void *handler) {
        FfiMetadata metadata = {sizeof metadata, {sizeof(FfiVersion), NULL, -1, -1}, 7};
        FfiMetadataExtension extension = {{sizeof extension, FFI_EXTENSION_METADATA, NULL}, &metadata};
        FfiFrame frame;
        memset(&frame, 0, sizeof frame);
        frame.extensions = &extension.base;
        FfiError *error = ((FfiError *(*)(FfiFrame *))handler)(&frame);
        return error || metadata.traits ? -1 : 100 * metadata.version.major + metadata.version.minor;
    }
    """
    enum: FFI_F32, FFI_S32, FFI_STAGE_EXECUTE
    ctypedef struct FfiError:
        int code
        char* message
    ctypedef struct FfiContext:
        int64_t num_threads
        int late, refusing, silent, num_tasks
    ctypedef struct FfiBuffer:
        int dtype
        int64_t rank
    FfiBuffer fake_buffer(void* memory, int dtype, int64_t rank, int64_t* dims)
    FfiError* fake_call(void* handler, FfiContext* c, FfiBuffer** args, int num_args, FfiBuffer** rets, int num_rets,
                        int stage) nogil
    int fake_version(void* handler)
    void c_free "free"(void* memory)


def version(handler):
    """100 * major + minor of what a handler speaks."""
    return fake_version(PyCapsule_GetPointer(handler, NULL))


def call(handler, float[:, :, ::1] table not None, int[:, ::1] step not None, bint create=False, int threads=1,
         bint late=False, int refusing=0, bint silent=False, str wrong="", int stage=FFI_STAGE_EXECUTE):
    """Call a handler on one device's table: (table, step) → the table in place, or with ``create`` (step) → the table.

    refusing : from this task on (1: all); wrong : something that is not as the handler wants it
    Returns None, or (code, message) of its error.
    """
    cdef void* at = PyCapsule_GetPointer(handler, NULL)
    cdef FfiContext context
    cdef int64_t[3] table_dims
    cdef int64_t[2] step_dims
    cdef float other = 0
    cdef FfiBuffer table_buffer, result, step_buffer
    cdef FfiBuffer* args[2]
    cdef FfiBuffer* rets[1]
    cdef FfiError* error
    context.num_threads, context.late, context.refusing, context.silent = threads, late, refusing, silent
    context.num_tasks = 0
    table_dims[0], table_dims[1], table_dims[2] = table.shape[0], table.shape[1], table.shape[2]
    step_dims[0], step_dims[1] = step.shape[0], step.shape[1]
    table_buffer = fake_buffer(&table[0, 0, 0], FFI_F32, 3, table_dims)
    result = fake_buffer(&other if wrong == "moved" else &table[0, 0, 0], FFI_F32, 3, table_dims)
    step_buffer = fake_buffer(&step[0, 0], FFI_S32, 2, step_dims)
    if wrong == "dtype":
        table_buffer.dtype = result.dtype = FFI_S32
    if wrong == "step":
        step_buffer.dtype = FFI_F32
    args[0] = &step_buffer if create else &table_buffer
    args[1] = &step_buffer
    rets[0] = &result
    cdef int num_args = (1 if create else 2) - (wrong == "missing")
    with nogil:
        error = fake_call(at, &context, args, num_args, rets, 1, stage)
    if error == NULL:
        return None
    found = error.code, (<bytes>error.message).decode()
    c_free(error)
    return found
