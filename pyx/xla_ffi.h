/* The part of XLA's FFI that a handler on the CPU needs: its C API, version 0.3, declared by ourselves.
 *
 * XLA's own header comes with jaxlib, which is not needed to build penstock. The layouts below are that
 * API's stable binary interface: a runtime asks a handler for its version (ffi_answer_metadata) before it
 * takes it, and refuses versions that it does not support. Fields that nothing here reads are kept for
 * their place. No function of XLA is linked; they are reached through the table in the call frame.
 */
#ifndef PENSTOCK_XLA_FFI_H
#define PENSTOCK_XLA_FFI_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { FFI_MAJOR = 0, FFI_MINOR = 3 };
enum { FFI_EXTENSION_METADATA = 1, FFI_STAGE_EXECUTE = 3, FFI_INVALID_ARGUMENT = 3, FFI_RESOURCE_EXHAUSTED = 8, FFI_INTERNAL = 13 };
enum { FFI_S32 = 4, FFI_F32 = 11 };

typedef struct FfiError FfiError;
typedef struct FfiContext FfiContext;

typedef struct FfiExtension {
    size_t struct_size;
    int type;
    struct FfiExtension *next;
} FfiExtension;

typedef struct {
    size_t struct_size;
    FfiExtension *extensions;
    int major, minor;
} FfiVersion;

typedef struct {
    size_t struct_size;
    FfiVersion version;
    uint32_t traits;
} FfiMetadata;

typedef struct {
    FfiExtension base;
    FfiMetadata *metadata;
} FfiMetadataExtension;

typedef struct {
    size_t struct_size;
    FfiExtension *extensions;
    int dtype;
    void *data;
    int64_t rank;
    int64_t *dims;
} FfiBuffer;

typedef struct {
    size_t struct_size;
    FfiExtension *extensions;
    int64_t size;
    int *types;
    FfiBuffer **buffers;
} FfiBuffers; /* arguments, and results */

typedef struct {
    size_t struct_size;
    FfiExtension *extensions;
    const char *message;
    int code;
} FfiErrorCreate;

typedef struct {
    size_t struct_size;
    FfiExtension *extensions;
    FfiError *error;
} FfiErrorDestroy;

typedef struct {
    size_t struct_size;
    FfiExtension *extensions;
    FfiContext *context;
    void (*task)(void *);
    void *data;
} FfiSchedule;

typedef struct {
    size_t struct_size;
    FfiExtension *extensions;
    FfiContext *context;
    int64_t *num_threads;
} FfiNumThreads;

typedef struct {
    size_t struct_size;
    FfiExtension *extensions;
    FfiVersion version;
    const void *internal;
    FfiError *(*create_error)(FfiErrorCreate *);
    void (*error_message)(void);
    void (*destroy_error)(FfiErrorDestroy *);
    void (*before_schedule[8])(void);
    FfiError *(*schedule)(FfiSchedule *);
    FfiError *(*num_threads)(FfiNumThreads *);
} FfiApi;

typedef struct {
    size_t struct_size;
    FfiExtension *extensions;
    const FfiApi *api;
    FfiContext *context;
    int stage;
    FfiBuffers args;
    FfiBuffers rets;
    /* attributes and a future follow; nothing here looks at them */
} FfiFrame;

static inline FfiError *ffi_error(const FfiFrame *frame, int code, const char *message) {
    FfiErrorCreate args = {sizeof(FfiErrorCreate), NULL, message, code};
    return frame->api->create_error(&args);
}

/* 1 where the frame only asks which version the handler speaks; it has then been told. */
static inline int ffi_answer_metadata(FfiFrame *frame) {
    FfiExtension *extension = frame->extensions;
    for (; extension != NULL; extension = extension->next) {
        if (extension->type == FFI_EXTENSION_METADATA) {
            FfiMetadata *metadata = ((FfiMetadataExtension *)extension)->metadata;
            metadata->version.major = FFI_MAJOR;
            metadata->version.minor = FFI_MINOR;
            metadata->traits = 0;
            return 1;
        }
    }
    return 0;
}

static inline int64_t ffi_num_threads(const FfiFrame *frame) {
    int64_t num_threads = 1;
    FfiNumThreads args = {sizeof(FfiNumThreads), NULL, frame->context, &num_threads};
    FfiError *error = frame->api->num_threads(&args);
    if (error != NULL) {
        FfiErrorDestroy destroy = {sizeof(FfiErrorDestroy), NULL, error};
        frame->api->destroy_error(&destroy);
        return 1;
    }
    return num_threads;
}

/* 1 where a thread of XLA's pool will run task(data), now or later. */
static inline int ffi_schedule(const FfiFrame *frame, void (*task)(void *), void *data) {
    FfiSchedule args = {sizeof(FfiSchedule), NULL, frame->context, task, data};
    FfiError *error = frame->api->schedule(&args);
    if (error != NULL) {
        FfiErrorDestroy destroy = {sizeof(FfiErrorDestroy), NULL, error};
        frame->api->destroy_error(&destroy);
        return 0;
    }
    return 1;
}

#endif
