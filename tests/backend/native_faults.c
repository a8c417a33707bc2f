/* The example device with one fault, which a macro chooses. */
#define hetpipe_backend_entry example_entry
#include "device.c"
#undef hetpipe_backend_entry

#include <signal.h>
#include <unistd.h>

#if defined CRASH_AT_LOAD
__attribute__((constructor)) static void at_load(void)
{
    raise(SIGSEGV);
}
#endif

static int faulty_count(uint32_t *count, hetpipe_error *error)
{
#if defined ABORT_IN_COUNT
    fprintf(stderr, "libfaulty: assertion failed\n");
    abort();
#elif defined COUNT_FAILS
    return fail(error, "the driver is too old");
#elif defined ENDLESS_COUNT
    *count = 1000000;
    return HETPIPE_OK;
#endif
    return count_devices(count, error);
}

static int faulty_describe(uint32_t index, hetpipe_device_info *info, hetpipe_error *error)
{
#if defined HANG_IN_DESCRIBE
    for (;;)
        sleep(1);
#endif
    describe(index, info, error);
#if defined NO_FLOAT32
    info->dtypes = 1u << HETPIPE_INT64;
#elif defined UNKNOWN_DTYPE
    info->dtypes |= 1u << 31;
#elif defined BAD_KIND
    memset(info->kind, 'x', sizeof info->kind); /* and no end */
#elif defined BAD_ID
    strcpy(info->device, "my card:0");
#endif
    return HETPIPE_OK;
}

static int faulty_open(uint32_t index, hetpipe_device **device, hetpipe_error *error)
{
#if defined OPEN_FAILS
    return fail(error, "the device is taken by process 7");
#elif defined OPEN_GIVES_NULL
    *device = NULL;
    return HETPIPE_OK;
#endif
    return open_device(index, device, error);
}

static int finished(int status, hetpipe_event **event, hetpipe_error *error)
{
    if (status != HETPIPE_OK)
        return status;
    while ((status = wait_for(*event, 10, error)) == HETPIPE_NOT_YET)
        ;
    release_event(*event);
    *event = NULL;
    return status;
}

static int blocking_upload(hetpipe_buffer *dst, const void *src, uint64_t nbytes,
                           hetpipe_event **event, hetpipe_error *error)
{
    return finished(upload(dst, src, nbytes, event, error), event, error);
}

static int blocking_download(hetpipe_buffer *src, void *dst, uint64_t nbytes,
                             hetpipe_event **event, hetpipe_error *error)
{
    return finished(download(src, dst, nbytes, event, error), event, error);
}

static int faulty_run(hetpipe_program *p, uint32_t queue, hetpipe_buffer *const *inputs,
                      const uint8_t *donated, hetpipe_buffer **outputs,
                      hetpipe_event *const *after, uint32_t after_count, hetpipe_event **event,
                      hetpipe_error *error)
{
    int status;
#if defined RUN_FAILS
    return fail(error, "the bus is stuck");
#elif defined RUN_INVENTS_A_CODE
    return 99;
#endif
    status = run(p, queue, inputs, donated, outputs, after, after_count, event, error);
#if defined RUN_GIVES_NULL
    outputs[0] = NULL;
#elif defined RUN_RETURNS_AN_INPUT
    outputs[0] = inputs[0];
#elif defined BLOCKING
    return finished(status, event, error);
#endif
    return status;
}

#if defined SLOW
static int slow_wait(hetpipe_event *event, double timeout_s, hetpipe_error *error)
{
    (void)event, (void)error;
    struct timespec time;
    time.tv_sec = 0;
    time.tv_nsec = (long)(timeout_s * 1e9); /* hetpipe never waits for a second within a library */
    nanosleep(&time, NULL);
    return HETPIPE_NOT_YET;
}
#endif

#if !defined NO_ENTRY
HETPIPE_EXPORT
#endif
const hetpipe_backend *hetpipe_backend_entry(uint32_t host_version)
{
    static hetpipe_backend table;
    table = *example_entry(host_version);
    table.name = "faulty";
    table.count = faulty_count;
    table.describe = faulty_describe;
    table.open = faulty_open;
    table.run = faulty_run;
#if defined OTHER_VERSION
    table.abi_version = 7;
#elif defined NO_VERSION
    return NULL;
#elif defined NO_RUN
    table.run = NULL;
#elif defined HALF_EVENTS
    table.release_event = NULL;
#elif defined EVENTS_UNTOLD
    table.wait = NULL;
    table.release_event = NULL;
#elif defined BAD_NAME
    table.name = "My Card";
#elif defined SAME_NAME
    table.name = "example";
#elif defined SLOW
    table.wait = slow_wait;
#elif defined BLOCKING
    /* As built with a header that had no optional members. */
    table.struct_size = offsetof(hetpipe_backend, wait);
    table.upload = blocking_upload;
    table.download = blocking_download;
    table.name = "blocking";
#endif
    return &table;
}
