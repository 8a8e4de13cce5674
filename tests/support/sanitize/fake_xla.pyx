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
    struct XLA_FFI_Error { int code; char message[200]; };
    typedef struct { XLA_FFI_Task *task; void *given; } FakeTask;
    struct XLA_FFI_ExecutionContext {
        int64_t num_threads;
        int late, refusing, silent, num_tasks;
        FakeTask tasks[MOST_TASKS];
        pthread_t threads[MOST_TASKS];
    };

    static XLA_FFI_Error *fake_create(XLA_FFI_Error_Create_Args *args) {
        XLA_FFI_Error *error = (XLA_FFI_Error *)malloc(sizeof(XLA_FFI_Error));
        error->code = args->errc;
        snprintf(error->message, sizeof error->message, "%s", args->message);
        return error;
    }
    static void fake_destroy(XLA_FFI_Error_Destroy_Args *args) { free(args->error); }
    static XLA_FFI_Error *fake_error(void) {
        XLA_FFI_Error_Create_Args args = {sizeof args, NULL, "no", XLA_FFI_Error_Code_INTERNAL};
        return fake_create(&args);
    }
    static void *fake_thread(void *given) {
        FakeTask *task = (FakeTask *)given;
        task->task(task->given);
        return NULL;
    }
    static XLA_FFI_Error *fake_schedule(XLA_FFI_ThreadPool_Schedule_Args *args) {
        XLA_FFI_ExecutionContext *c = args->ctx;
        if (c->num_tasks == MOST_TASKS || (c->refusing && c->num_tasks >= c->refusing - 1))
            return fake_error();
        FakeTask *task = &c->tasks[c->num_tasks];
        task->task = args->task, task->given = args->data;
        if (!c->late && pthread_create(&c->threads[c->num_tasks], NULL, fake_thread, task))
            return fake_error();
        c->num_tasks++;
        return NULL;
    }
    static XLA_FFI_Error *fake_num_threads(XLA_FFI_ThreadPool_NumThreads_Args *args) {
        if (args->ctx->silent)
            return fake_error();
        *args->num_threads = args->ctx->num_threads;
        return NULL;
    }

    static XLA_FFI_Buffer fake_buffer(void *memory, int dtype, int64_t rank, int64_t *dims) {
        XLA_FFI_Buffer buffer = {sizeof buffer, NULL, dtype, memory, rank, dims};
        return buffer;
    }

    /* A call with up to two arguments and one result. Returns the error, or NULL. */
    static XLA_FFI_Error *fake_call(void *handler, XLA_FFI_ExecutionContext *c, void **args, int num_args, void **rets,
                                    int num_rets, int stage) {
        XLA_FFI_Api api;
        memset(&api, 0, sizeof api);
        api.struct_size = sizeof api;
        api.XLA_FFI_Error_Create = fake_create, api.XLA_FFI_Error_Destroy = fake_destroy;
        api.XLA_FFI_ThreadPool_Schedule = fake_schedule, api.XLA_FFI_ThreadPool_NumThreads = fake_num_threads;
        XLA_FFI_CallFrame frame;
        memset(&frame, 0, sizeof frame);
        frame.struct_size = sizeof frame, frame.api = &api, frame.ctx = c, frame.stage = stage;
        frame.args.size = num_args, frame.args.args = args;
        frame.rets.size = num_rets, frame.rets.rets = rets;
        XLA_FFI_Error *error = ((XLA_FFI_Handler *)handler)(&frame);
        for (int n = 0; c->late && n < c->num_tasks; n++)
            pthread_create(&c->threads[n], NULL, fake_thread, &c->tasks[n]);
        for (int n = 0; n < c->num_tasks; n++)
            pthread_join(c->threads[n], NULL);
        return error;
    }

    /* What a handler says of its version. */
    static int fake_version(void *handler) {
        XLA_FFI_Metadata metadata = {sizeof metadata, {sizeof(XLA_FFI_Api_Version), NULL, -1, -1}, 7};
        XLA_FFI_Metadata_Extension extension = {{sizeof extension, XLA_FFI_Extension_Metadata, NULL}, &metadata};
        XLA_FFI_CallFrame frame;
        memset(&frame, 0, sizeof frame);
        frame.extension_start = &extension.extension_base;
        XLA_FFI_Error *error = ((XLA_FFI_Handler *)handler)(&frame);
        XLA_FFI_Api_Version version = metadata.api_version;
        return error || metadata.traits ? -1 : 100 * version.major_version + version.minor_version;
    }
    """
    enum: XLA_FFI_DataType_F32, XLA_FFI_DataType_S32, XLA_FFI_ExecutionStage_EXECUTE
    ctypedef struct XLA_FFI_Error:
        int code
        char* message
    ctypedef struct XLA_FFI_ExecutionContext:
        int64_t num_threads
        int late, refusing, silent, num_tasks
    ctypedef struct XLA_FFI_Buffer:
        int dtype
        int64_t rank
    XLA_FFI_Buffer fake_buffer(void* memory, int dtype, int64_t rank, int64_t* dims)
    XLA_FFI_Error* fake_call(void* handler, XLA_FFI_ExecutionContext* c, void** args, int num_args, void** rets,
                             int num_rets, int stage) nogil
    int fake_version(void* handler)
    void c_free "free"(void* memory)


def version(handler):
    """100 * major + minor of what a handler speaks."""
    return fake_version(PyCapsule_GetPointer(handler, NULL))


def call(handler, float[:, :, ::1] table not None, int[:, ::1] step not None, bint create=False, int threads=1,
         bint late=False, int refusing=0, bint silent=False, str wrong="", int stage=XLA_FFI_ExecutionStage_EXECUTE):
    """Call a handler on one device's table: (table, step) → the table in place, or with ``create`` (step) → the table.

    refusing : from this task on (1: all); wrong : something that is not as the handler wants it
    Returns None, or (code, message) of its error.
    """
    cdef void* at = PyCapsule_GetPointer(handler, NULL)
    cdef XLA_FFI_ExecutionContext context
    cdef int64_t[3] table_dims
    cdef int64_t[2] step_dims
    cdef float other = 0
    cdef XLA_FFI_Buffer table_buffer, result, step_buffer
    cdef void* args[2]
    cdef void* rets[1]
    cdef XLA_FFI_Error* error
    context.num_threads, context.late, context.refusing, context.silent = threads, late, refusing, silent
    context.num_tasks = 0
    table_dims[0], table_dims[1], table_dims[2] = table.shape[0], table.shape[1], table.shape[2]
    step_dims[0], step_dims[1] = step.shape[0], step.shape[1]
    table_buffer = fake_buffer(&table[0, 0, 0], XLA_FFI_DataType_F32, 3, table_dims)
    result = fake_buffer(&other if wrong == "moved" else &table[0, 0, 0], XLA_FFI_DataType_F32, 3, table_dims)
    step_buffer = fake_buffer(&step[0, 0], XLA_FFI_DataType_S32, 2, step_dims)
    if wrong == "dtype":
        table_buffer.dtype = result.dtype = XLA_FFI_DataType_S32
    if wrong == "step":
        step_buffer.dtype = XLA_FFI_DataType_F32
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
