/* The C interface of hetpipe's backend `native`, version 1.
 *
 * A hardware vendor ships a shared library that exports one function, hetpipe_backend_entry. The
 * function returns a table of functions. A user gives hetpipe the path of the library
 * (docs/native.md), and its devices then train stages of models like all other devices. Graphs
 * arrive as bytes, which hetpipe_graph.h reads.
 *
 * Why a table and not a symbol per function: everything else in the library can be `static`; an
 * optional function that the library lacks is NULL; and a later version can add members at the end.
 *
 * Rules that hold for every function:
 *
 * Errors. A function that returns `int` returns HETPIPE_OK or another code below. Unless the code
 * is HETPIPE_OK or HETPIPE_NOT_YET, it writes the reason into `error->text`, which belongs to the
 * caller and is not kept between calls. A function that fails must do nothing: it queues no work
 * and sets none of its results. Users read these texts: name the operator and the layer.
 *
 * Threads. The host calls functions from any thread, also at the same time, with two exceptions: it
 * never calls `run` of one program from two threads at once, and a function that gives something
 * back (`close`, `free`, `release_program`, `release_event`) is the last call that uses the thing.
 * All functions may take locks. `open`, `compile` and `close` may take long. The other functions
 * only queue work; they may also do the work themselves, and return when it is done.
 *
 * Memory. The library owns everything that it returns, until the host gives it back through the
 * matching function. Pointers from the host are valid only during the call, unless a comment says
 * "until the event". The host keeps a buffer, a program and the events in `after` until the work
 * that uses them has ended, so no function has to count references. The host gives back all
 * buffers, programs and events of a device before it closes the device.
 */
#ifndef HETPIPE_BACKEND_H
#define HETPIPE_BACKEND_H

#include <stdint.h>

#define HETPIPE_EXPORT __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

enum { HETPIPE_ABI_VERSION = 1 };

/* Return codes of functions. */
enum {
    HETPIPE_OK = 0,
    HETPIPE_FAILED = 1,      /* any failure: out of memory, device lost, a damaged graph */
    HETPIPE_UNSUPPORTED = 2, /* from `supports` and `compile`: the device cannot run an operator */
    HETPIPE_NOT_YET = 3      /* from `wait`: the work has not ended */
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
    HETPIPE_EMULATED = 1,         /* emulates other hardware, whose speed its times do not show */
    HETPIPE_REFERENCE = 2,        /* built to be correct, not fast */
    HETPIPE_FLUSHES_DENORMALS = 4 /* numbers below the smallest normal one may become zero */
};

/* The library defines these types; the host only passes pointers to them. */
typedef struct hetpipe_device hetpipe_device;   /* an opened device */
typedef struct hetpipe_buffer hetpipe_buffer;   /* bytes in a device's memory */
typedef struct hetpipe_program hetpipe_program; /* a graph compiled for a device */
typedef struct hetpipe_event hetpipe_event;     /* the end of work on a device */

/* The reason for a failure: UTF-8 text that ends with a zero byte. */
typedef struct hetpipe_error {
    char text[1024];
} hetpipe_error;

/* The description of a device. The host sets all bytes to zero before it calls `describe`. */
typedef struct hetpipe_device_info {
    char device[32];         /* its name in ids: small letters, digits, - and _, such as "card" */
    char name[128];          /* for people: "Example card, 8 GiB" */
    char vendor[128];
    char driver[128];        /* with version: measured costs are valid until this text changes */
    char kind[8];            /* cpu, gpu, fpga, npu or other */
    char memory_domain[64];  /* devices with the same text share memory: "host" for host memory;
                                empty if it shares memory with no other device */
    uint64_t memory_nbytes;  /* memory that graphs may use */
    uint32_t dtypes;         /* types that graphs compute in: 1u << HETPIPE_FLOAT32 | ... */
    uint32_t cast_dtypes;    /* further types that graphs can store and cast, but not compute in */
    uint32_t queues;         /* passes that can run at the same time, see `run`; 0 counts as 1 */
    uint32_t flags;          /* HETPIPE_EMULATED | HETPIPE_REFERENCE | ... */
} hetpipe_device_info;

typedef struct hetpipe_backend {
    uint32_t abi_version; /* HETPIPE_ABI_VERSION */
    uint32_t struct_size; /* sizeof(hetpipe_backend), of the library's header */

    /* The library's name in device ids, such as "acme" in native:acme.card:0: small letters,
     * digits, - and _. Two libraries must not have the same name. */
    const char *name;

    /* Discovery. These functions open no device and take at most a second or two. The host calls
     * them in a process that may crash or be killed without harm. Later calls must number the
     * devices in the same way. */
    int (*count)(uint32_t *count, hetpipe_error *error);
    int (*describe)(uint32_t index, hetpipe_device_info *info, hetpipe_error *error);

    /* Open device `index`, perhaps before any call of `count` in this process. The host may open
     * one device several times, and gets a separate hetpipe_device each time. When the host calls
     * `close`, all work has ended. */
    int (*open)(uint32_t index, hetpipe_device **device, hetpipe_error *error);
    void (*close)(hetpipe_device *device);

    /* Allocate a buffer of `nbytes` bytes (0 is possible), with any content. A buffer stores a
     * tensor in row-major order without gaps. The host also calls `free` for outputs of `run`, and
     * only when no work uses the buffer. */
    int (*allocate)(hetpipe_device *device, uint64_t nbytes, hetpipe_buffer **buffer,
                    hetpipe_error *error);
    void (*free)(hetpipe_buffer *buffer);

    /* Copy the first `nbytes` bytes, at least one, from or to the host's memory. The host's memory
     * is valid until the event. Until then, no other work uses `dst` of an upload or writes `src`
     * of a download. */
    int (*upload)(hetpipe_buffer *dst, const void *src, uint64_t nbytes, hetpipe_event **event,
                  hetpipe_error *error);
    int (*download)(hetpipe_buffer *src, void *dst, uint64_t nbytes, hetpipe_event **event,
                    hetpipe_error *error);

    /* Compile a serialised graph. The graph's inputs are the program's inputs, in order. Its
     * outputs are distinct results of calls, never inputs. Return HETPIPE_UNSUPPORTED for exactly
     * the operators that `supports` refuses. */
    int (*compile)(hetpipe_device *device, const void *graph, uint64_t nbytes,
                   hetpipe_program **program, hetpipe_error *error);
    void (*release_program)(hetpipe_program *program);

    /* Queue a run of a program. It starts after the work of the `after_count` events in `after` has
     * ended, and waits for no other work. The events belong to the same device. If one of them has
     * failed or fails, the run fails with the same error.
     *
     * inputs[i] is the buffer of input i. If donated[i] is 1, nobody reads the buffer again: the
     * run may overwrite it, and may return it as an output. The run must not change other inputs.
     *
     * The library sets outputs[j] to the buffer of output j: a new buffer, or a donated input of
     * the same size, which is then an output and no longer an input. All outputs are distinct
     * buffers. Their content is valid once the event has happened.
     *
     * `queue` is less than the device's `queues`. Runs in the same queue may wait for each other.
     * Runs in different queues must not wait for each other, and must not share scratch memory. */
    int (*run)(hetpipe_program *program, uint32_t queue, hetpipe_buffer *const *inputs,
               const uint8_t *donated, hetpipe_buffer **outputs, hetpipe_event *const *after,
               uint32_t after_count, hetpipe_event **event, hetpipe_error *error);

    /* All members from here on are optional and may be NULL. */

    /* Wait until the work of an event has ended, but at most `timeout_s` seconds, a finite number;
     * with 0, return at once. HETPIPE_OK: the work has ended. HETPIPE_NOT_YET: it has not ended.
     * Other codes: it has failed; every later call must return the same code. Several threads may
     * wait for one event.
     *
     * `release_event` gives back an event whose work has ended.
     *
     * A library whose functions return only when the work is done sets every *event to NULL, and
     * leaves out these two functions. */
    int (*wait)(hetpipe_event *event, double timeout_s, hetpipe_error *error);
    void (*release_event)(hetpipe_event *event);

    /* Return HETPIPE_OK if the device can run the single call in a serialised graph of inputs, the
     * call, items of its result and an output; otherwise HETPIPE_UNSUPPORTED, with the reason. The
     * host calls this function thousands of times while it makes a plan. If the function is NULL,
     * the host compiles such graphs. */
    int (*supports)(hetpipe_device *device, const void *graph, uint64_t nbytes,
                    hetpipe_error *error);

    /* Return the bytes that this process holds on the device. If the function is NULL, reports do
     * not show these bytes. */
    int (*memory_used)(hetpipe_device *device, uint64_t *nbytes, hetpipe_error *error);
} hetpipe_backend;

/* The only symbol that a library exports. `host_version` is the host's HETPIPE_ABI_VERSION: return
 * the table of that version, or NULL if the library has none. The table stays valid while the
 * library is loaded. Do nothing here that can fail; leave that to `count`. */
const hetpipe_backend *hetpipe_backend_entry(uint32_t host_version);

#ifdef __cplusplus
}
#endif

#endif
