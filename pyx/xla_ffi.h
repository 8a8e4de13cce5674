/* What a handler on the CPU needs of XLA's FFI: errors, its version, XLA's thread pool.
 *
 * No function of XLA is linked: a handler reaches them through the table in its call frame.
 */
#ifndef PENSTOCK_XLA_FFI_H
#define PENSTOCK_XLA_FFI_H

#include "vendor/xla/ffi/api/c_api.h"

static inline XLA_FFI_Error *ffi_error(const XLA_FFI_CallFrame *frame, XLA_FFI_Error_Code code, const char *message) {
    XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, NULL, message, code};
    return frame->api->XLA_FFI_Error_Create(&args);
}

static inline void ffi_destroy_error(const XLA_FFI_CallFrame *frame, XLA_FFI_Error *error) {
    XLA_FFI_Error_Destroy_Args args = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, NULL, error};
    frame->api->XLA_FFI_Error_Destroy(&args);
}

/* 1 where XLA asks only for the version of the API that the handler was compiled with; the answer is then written. */
static inline int ffi_answer_metadata(XLA_FFI_CallFrame *frame) {
    for (XLA_FFI_Extension_Base *extension = frame->extension_start; extension != NULL; extension = extension->next) {
        if (extension->type == XLA_FFI_Extension_Metadata) {
            XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)extension)->metadata;
            metadata->api_version.major_version = XLA_FFI_API_MAJOR;
            metadata->api_version.minor_version = XLA_FFI_API_MINOR;
            metadata->traits = 0;
            return 1;
        }
    }
    return 0;
}

static inline int64_t ffi_num_threads(const XLA_FFI_CallFrame *frame) {
    int64_t num_threads = 1;
    XLA_FFI_ThreadPool_NumThreads_Args args = {XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, NULL, frame->ctx,
                                               &num_threads};
    XLA_FFI_Error *error = frame->api->XLA_FFI_ThreadPool_NumThreads(&args);
    if (error == NULL) return num_threads;
    ffi_destroy_error(frame, error);
    return 1;
}

/* 1 where a thread of XLA's pool will run task(data), now or later. */
static inline int ffi_schedule(const XLA_FFI_CallFrame *frame, XLA_FFI_Task *task, void *data) {
    XLA_FFI_ThreadPool_Schedule_Args args = {XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, NULL, frame->ctx, task, data};
    XLA_FFI_Error *error = frame->api->XLA_FFI_ThreadPool_Schedule(&args);
    if (error == NULL) return 1;
    ffi_destroy_error(frame, error);
    return 0;
}

#endif
