/* The C interface of hetpipe's backend `native`, version 1.
 *
 * A maker of hardware ships a shared library that exports one function, hetpipe_backend_entry. It
 * returns a table of functions. The library is named to hetpipe (docs/native.md), and its devices
 * then train stages of models like all others. Graphs come as bytes: hetpipe_graph.h reads them.
 *
 * Why a table and one symbol, in place of a symbol per function: everything else in the library can
 * be `static`; members that are left out are NULL, which says which of them are optional; and a
 * later version may add members at the end.
 *
 * Rules that hold for every function:
 *
 * Errors. A function that returns `int` returns HETPIPE_OK or one of the codes below. For every
 * other code than HETPIPE_NOT_YET it writes the reason into `error->text`, which belongs to the
 * caller; nothing is kept between calls. A function that fails has done nothing: it has queued no
 * work, and has set none of its results. Texts reach the user: name operator and layer.
 *
 * Threads. Functions are called from any thread, and at the same time, with two exceptions: one
 * thread at a time calls `run` of one program, and a function that gives something back (`close`,
 * `free`, `release_program`, `release_event`) is the last one that is called with it. All may take
 * locks. `open`, `compile`, `close` may take long; the others only queue work, but they may also do
 * it at once and return when it is done.
 *
 * Memory. All that the library returns is the library's, until it is given back by the function
 * for it. Pointers that the host passes are valid during the call alone, except where it says "until
 * the event". The host keeps a buffer, a program, and the events in `after` until the work that uses
 * them has ended, so no function has to count references. It gives back all buffers, programs and
 * events of a device before it closes the device.
 */
#ifndef HETPIPE_BACKEND_H
#define HETPIPE_BACKEND_H

#include <stdint.h>

#define HETPIPE_EXPORT __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

enum { HETPIPE_ABI_VERSION = 1 };

/* What functions return. */
enum {
    HETPIPE_OK = 0,
    HETPIPE_FAILED = 1,      /* any failure: out of memory, device lost, a damaged graph */
    HETPIPE_UNSUPPORTED = 2, /* of `supports` and `compile`: the device cannot run an operator */
    HETPIPE_NOT_YET = 3      /* of `wait`: the work has not ended */
};

/* Element types; the same codes as in serialised graphs. A bool is one byte, 0 or 1. */
enum {
    HETPIPE_FLOAT32 = 1,
    HETPIPE_FLOAT64 = 2,
    HETPIPE_FLOAT16 = 3,
    HETPIPE_BFLOAT16 = 4,
    HETPIPE_INT64 = 5,
    HETPIPE_INT32 = 6,
    HETPIPE_INT16 = 7,
    HETPIPE_INT8 = 8,
    HETPIPE_UINT8 = 9,
    HETPIPE_BOOL = 10
};

/* Flags of a device. Emulators and references join a cluster only by name. */
enum {
    HETPIPE_EMULATED = 1,         /* an emulator of other hardware: its times say nothing about that */
    HETPIPE_REFERENCE = 2,        /* made to be right, not fast */
    HETPIPE_FLUSHES_DENORMALS = 4 /* numbers below the smallest normal one may become zero */
};

/* Whatever the library likes: the host only passes pointers to them. */
typedef struct hetpipe_device hetpipe_device;   /* an opened device */
typedef struct hetpipe_buffer hetpipe_buffer;   /* bytes in a device's memory */
typedef struct hetpipe_program hetpipe_program; /* a graph compiled for a device */
typedef struct hetpipe_event hetpipe_event;     /* the end of work on a device */

/* The reason of a failure: text in UTF-8 that ends in a zero byte. */
typedef struct hetpipe_error {
    char text[1024];
} hetpipe_error;

/* A device's description of itself. The host sets all of it to zero first. */
typedef struct hetpipe_device_info {
    char device[32];         /* kind of device in ids: small letters, digits, - and _, as "card" */
    char name[128];          /* for people: "Example card, 8 GiB" */
    char vendor[128];
    char driver[128];        /* with its version: measured costs are kept until it changes */
    char kind[8];            /* cpu, gpu, fpga, npu or other */
    char memory_domain[64];  /* devices with the same text share memory: "host" for the host's own;
                                empty for memory of its own */
    uint64_t memory_nbytes;  /* that graphs may use */
    uint32_t dtypes;         /* types that graphs compute in: 1u << HETPIPE_FLOAT32 | ... */
    uint32_t cast_dtypes;    /* further types, which it stores and casts, but computes nothing in */
    uint32_t queues;         /* passes that may run at once, see `run`; 0 counts as 1 */
    uint32_t flags;          /* HETPIPE_EMULATED | HETPIPE_REFERENCE | ... */
} hetpipe_device_info;

typedef struct hetpipe_backend {
    uint32_t abi_version; /* HETPIPE_ABI_VERSION */
    uint32_t struct_size; /* sizeof(hetpipe_backend), of the library's header */

    /* Names the library in ids of devices, as "acme" in native:acme.card:0; small letters, digits,
     * - and _. No two libraries have the same. */
    const char *name;

    /* Discovery. It opens nothing and takes less than a second or two. The host calls it in a
     * process that may crash or be killed without harm. Later calls number devices alike. */
    int (*count)(uint32_t *count, hetpipe_error *error);
    int (*describe)(uint32_t index, hetpipe_device_info *info, hetpipe_error *error);

    /* Open device `index`, in a process that has not called `count` maybe; several times in a
     * process, maybe: every time is a device of its own. `close` waits for nothing: all work has
     * ended. */
    int (*open)(uint32_t index, hetpipe_device **device, hetpipe_error *error);
    void (*close)(hetpipe_device *device);

    /* A buffer of `nbytes` bytes, perhaps none, with any content. Tensors lie in it in row-major
     * order without gaps. `free` is also called for outputs of `run`; no work uses the buffer. */
    int (*allocate)(hetpipe_device *device, uint64_t nbytes, hetpipe_buffer **buffer,
                    hetpipe_error *error);
    void (*free)(hetpipe_buffer *buffer);

    /* Copy the first `nbytes` bytes, at least one, to or from the host's memory. The memory is valid
     * until the event. No other work uses `dst` of an upload, or writes `src` of a download,
     * meanwhile. */
    int (*upload)(hetpipe_buffer *dst, const void *src, uint64_t nbytes, hetpipe_event **event,
                  hetpipe_error *error);
    int (*download)(hetpipe_buffer *src, void *dst, uint64_t nbytes, hetpipe_event **event,
                    hetpipe_error *error);

    /* Compile a serialised graph. Its inputs are the program's inputs, in order. Its outputs are
     * results of calls, each another one; never an input. HETPIPE_UNSUPPORTED for an operator that
     * `supports` refuses, and for no other. */
    int (*compile)(hetpipe_device *device, const void *graph, uint64_t nbytes,
                   hetpipe_program **program, hetpipe_error *error);
    void (*release_program)(hetpipe_program *program);

    /* Queue a run of a program after the work of all `after_count` events in `after`, which are of
     * the same device, and after nothing else. If one of them has failed, or fails, the run fails
     * with its error.
     *
     * inputs[i] is the buffer of input i. If donated[i] is 1, nobody reads it again: the run may
     * overwrite it, and return it as an output. All other inputs stay as they are.
     *
     * The library sets outputs[j] to the buffer of output j: a new one, or one of the donated
     * inputs of the same size, which then is an output and no input any more. Each output is a
     * buffer of its own. Its content is valid when the event has happened.
     *
     * `queue` is less than the device's `queues`. Runs in one queue may wait for each other, runs
     * in two may not, and must not share scratch memory. */
    int (*run)(hetpipe_program *program, uint32_t queue, hetpipe_buffer *const *inputs,
               const uint8_t *donated, hetpipe_buffer **outputs, hetpipe_event *const *after,
               uint32_t after_count, hetpipe_event **event, hetpipe_error *error);

    /* All members from here on are optional: NULL is fine. */

    /* Wait until the work of an event has ended, but not longer than `timeout_s` seconds, which is
     * finite; 0 only looks. HETPIPE_OK: it has ended. HETPIPE_NOT_YET: it has not. Other codes: it
     * has ended and failed; every further call says the same. Several threads may wait.
     *
     * `release_event` gives an event back; its work has ended.
     *
     * A library whose functions return when the work is done sets *event to NULL everywhere, and
     * leaves these two out. */
    int (*wait)(hetpipe_event *event, double timeout_s, hetpipe_error *error);
    void (*release_event)(hetpipe_event *event);

    /* HETPIPE_OK if the device can run the one call in a serialised graph, which has inputs, the
     * call, items of its result and an output. HETPIPE_UNSUPPORTED, with the reason, if not. It is
     * called thousands of times while a plan is made. Without it, the host compiles such graphs. */
    int (*supports)(hetpipe_device *device, const void *graph, uint64_t nbytes,
                    hetpipe_error *error);

    /* Bytes that this process holds on the device. Without it, no report shows them. */
    int (*memory_used)(hetpipe_device *device, uint64_t *nbytes, hetpipe_error *error);
} hetpipe_backend;

/* The one symbol that a library exports. `host_version` is the host's HETPIPE_ABI_VERSION: a library
 * that has several versions returns the table of that one, or NULL if it has none for it. The table
 * stays valid while the library is loaded. Nothing is done here that may fail: see `count`. */
const hetpipe_backend *hetpipe_backend_entry(uint32_t host_version);

#ifdef __cplusplus
}
#endif

#endif
