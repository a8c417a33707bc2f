/* A complete backend for hetpipe: a "device" that computes on the host's processor, in a separate
 * thread. Start here: this file implements hetpipe_backend.h, the other files have the operators.
 *
 *     host threads  --jobs-->  queue of the device  -->  its thread: runs and copies, one at a time
 *                   <--------------events---------------
 *
 * A driver of real hardware has the same parts: its buffers, programs and events are handles of the
 * vendor's runtime, and its queue is the hardware's. */
#define _POSIX_C_SOURCE 200809L
#include "operators.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MEMORY_NBYTES ((uint64_t)2 << 30)
enum { DEVICES = 2 };

struct hetpipe_device {
    pthread_mutex_t lock; /* guards all members, and the state of all events of the device */
    pthread_cond_t changed;
    pthread_t thread;
    struct job *first, *last; /* the queue */
    int closing;
    uint64_t used_nbytes;
};

struct hetpipe_buffer {
    hetpipe_device *device;
    uint64_t nbytes;
    void *data;
};

struct hetpipe_event {
    hetpipe_device *device;
    int ended, status; /* status and error are set once it has ended */
    hetpipe_error error;
};

/* A graph, and the place of each call's results in one block of memory. A device with little memory
 * should reuse the memory of values that no later call reads. */
struct hetpipe_program {
    hetpipe_device *device;
    hetpipe_graph *graph;
    const operation **operations; /* [nodes]; NULL for nodes other than calls */
    tensor *tensors;              /* [nodes], without data */
    uint32_t *first;              /* [nodes]: the call's first result */
    tensor *results;              /* of all calls, in order; without data */
    uint64_t *offset;             /* of each result in the block */
    uint32_t result_count, inputs;
    uint64_t block_nbytes;
};

/* An entry of the queue: a run or a copy. */
typedef struct job {
    struct job *next;
    hetpipe_event *event;
    hetpipe_program *program; /* NULL: a copy */
    hetpipe_buffer **inputs, **outputs;
    hetpipe_event **after;
    uint32_t after_count;
    void *to;
    const void *from;
    size_t nbytes;
} job;

static int fail(hetpipe_error *error, const char *text)
{
    snprintf(error->text, sizeof error->text, "%s", text);
    return HETPIPE_FAILED;
}

static int unsupported(hetpipe_error *error, const char *text)
{
    fail(error, text);
    return HETPIPE_UNSUPPORTED;
}

/* ------------------------------------------------------------------------- discovery */

static int count_devices(uint32_t *count, hetpipe_error *error)
{
    (void)error;
    *count = DEVICES;
    return HETPIPE_OK;
}

static int describe(uint32_t index, hetpipe_device_info *info, hetpipe_error *error)
{
    (void)index, (void)error;
    strcpy(info->device, "cpu");
    strcpy(info->name, "example device in C");
    strcpy(info->vendor, "hetpipe");
    strcpy(info->driver, "1");
    strcpy(info->kind, "cpu");
    strcpy(info->memory_domain, "host");
    info->memory_nbytes = MEMORY_NBYTES;
    info->dtypes = 1u << HETPIPE_FLOAT32 | 1u << HETPIPE_INT64 | 1u << HETPIPE_INT32 | 1u << HETPIPE_BOOL;
    info->queues = 1;
    info->flags = HETPIPE_REFERENCE;
    return HETPIPE_OK;
}

/* ----------------------------------------------------------------------------- memory */

/* Return zeroed memory of the device for tensors (not programs); NULL if there is not enough. */
static void *take(hetpipe_device *device, uint64_t nbytes)
{
    void *data = NULL;
    pthread_mutex_lock(&device->lock);
    if (nbytes <= MEMORY_NBYTES - device->used_nbytes)
        data = calloc(1, nbytes ? (size_t)nbytes : 1);
    if (data)
        device->used_nbytes += nbytes;
    pthread_mutex_unlock(&device->lock);
    return data;
}

static void give(hetpipe_device *device, void *data, uint64_t nbytes)
{
    free(data);
    pthread_mutex_lock(&device->lock);
    device->used_nbytes -= nbytes;
    pthread_mutex_unlock(&device->lock);
}

static int allocate(hetpipe_device *device, uint64_t nbytes, hetpipe_buffer **buffer,
                    hetpipe_error *error)
{
    hetpipe_buffer *b = malloc(sizeof *b);
    void *data = b ? take(device, nbytes) : NULL;
    if (!data) {
        free(b);
        snprintf(error->text, sizeof error->text, "out of memory: no room for %llu bytes",
                 (unsigned long long)nbytes);
        return HETPIPE_FAILED;
    }
    b->device = device;
    b->nbytes = nbytes;
    b->data = data;
    *buffer = b;
    return HETPIPE_OK;
}

static void free_buffer(hetpipe_buffer *buffer)
{
    give(buffer->device, buffer->data, buffer->nbytes);
    free(buffer);
}

static int memory_used(hetpipe_device *device, uint64_t *nbytes, hetpipe_error *error)
{
    (void)error;
    pthread_mutex_lock(&device->lock);
    *nbytes = device->used_nbytes;
    pthread_mutex_unlock(&device->lock);
    return HETPIPE_OK;
}

/* ----------------------------------------------------------------- compiling a graph */

static int knows(const hetpipe_form *form)
{
    return form->dtype == HETPIPE_FLOAT32 || form->dtype == HETPIPE_INT64 ||
           form->dtype == HETPIPE_INT32 || form->dtype == HETPIPE_BOOL;
}

static tensor without_data(const hetpipe_form *form)
{
    tensor t;
    t.dtype = form->dtype;
    t.rank = form->rank;
    t.size = form->size;
    t.data = NULL;
    return t;
}

/* Check a call: its operator checks all arguments, as in a run. */
static int prepare_call(hetpipe_program *p, uint32_t n, hetpipe_error *error)
{
    const hetpipe_node *node = &p->graph->node[n];
    uint32_t i;
    call c;
    memset(&c, 0, sizeof c);
    c.node = node;
    c.operation = find_operation(node->target);
    c.tensors = p->tensors;
    c.results = &p->results[p->first[n]];
    c.dry = 1;
    c.error = error;
    if (!c.operation)
        return refuse(&c, HETPIPE_UNSUPPORTED, "the example has no such operator");
    if (node->results != (uint32_t)c.operation->results || node->several != (node->results > 1))
        return refuse(&c, HETPIPE_UNSUPPORTED, "it has another number of results");
    for (i = 0; i < node->results; i++)
        if (!knows(&node->forms[i]) && (node->forms[i].dtype || !node->several))
            return refuse(&c, HETPIPE_UNSUPPORTED, "a result has a type that the example lacks");
    p->operations[n] = c.operation;
    return c.operation->run(&c);
}

static int prepare(hetpipe_program *p, hetpipe_error *error)
{
    uint32_t n, i, k;
    for (n = 0; n < p->graph->nodes; n++) {
        const hetpipe_node *node = &p->graph->node[n];
        int status = HETPIPE_OK;
        if (node->op == HETPIPE_INPUT) {
            p->tensors[n] = without_data(&node->forms[0]);
            p->inputs++;
            if (!knows(&node->forms[0]))
                status = unsupported(error, "an input has a type that the example lacks");
        } else if (node->op == HETPIPE_CALL) {
            p->first[n] = p->result_count;
            for (i = 0; i < node->results; i++) {
                tensor t = without_data(&node->forms[i]);
                uint64_t nbytes = (uint64_t)elements(&t) * hetpipe_dtype_nbytes(t.dtype);
                if (nbytes > MEMORY_NBYTES - p->block_nbytes)
                    return fail(error, "the values of the graph do not fit into the memory");
                p->offset[p->result_count] = p->block_nbytes;
                p->results[p->result_count++] = t;
                p->block_nbytes += (nbytes + 63) / 64 * 64;
                if (p->block_nbytes > MEMORY_NBYTES)
                    return fail(error, "the values of the graph do not fit into the memory");
            }
            status = prepare_call(p, n, error);
            if (!node->several && status == HETPIPE_OK)
                p->tensors[n] = p->results[p->first[n]];
        } else if (node->op == HETPIPE_ITEM) {
            p->tensors[n] = without_data(&node->forms[0]);
            if (!same_form(&p->tensors[n], &p->results[p->first[node->of] + node->item]))
                return fail(error, "an item has another form than the result");
        } else {
            for (i = 0; i < node->outputs; i++)
                for (k = 0; k <= i; k++)
                    if (p->graph->node[node->output[i]].op == HETPIPE_INPUT ||
                        (k < i && node->output[i] == node->output[k]))
                        return fail(error, "an output is an input, or there twice");
        }
        if (status != HETPIPE_OK)
            return status;
    }
    return HETPIPE_OK;
}

static void release_program(hetpipe_program *p)
{
    hetpipe_graph_free(p->graph);
    free(p->operations);
    free(p->tensors);
    free(p->first);
    free(p->results);
    free(p->offset);
    free(p);
}

static int compile(hetpipe_device *device, const void *graph, uint64_t nbytes,
                   hetpipe_program **program, hetpipe_error *error)
{
    hetpipe_program *p = calloc(1, sizeof *p);
    size_t n, results = 0;
    int status;
    if (!p)
        return fail(error, "out of memory");
    p->device = device;
    p->graph = hetpipe_graph_read(graph, (size_t)nbytes, error->text, sizeof error->text);
    if (!p->graph) {
        free(p);
        return HETPIPE_FAILED;
    }
    for (n = 0; n < p->graph->nodes; n++)
        results += p->graph->node[n].results;
    n = p->graph->nodes;
    p->operations = calloc(n, sizeof *p->operations);
    p->tensors = calloc(n, sizeof *p->tensors);
    p->first = calloc(n, sizeof *p->first);
    p->results = calloc(results + 1, sizeof *p->results);
    p->offset = calloc(results + 1, sizeof *p->offset);
    if (p->operations && p->tensors && p->first && p->results && p->offset)
        status = prepare(p, error);
    else
        status = fail(error, "out of memory");
    if (status == HETPIPE_OK)
        *program = p;
    else
        release_program(p);
    return status;
}

/* Compile the graph, which makes all checks, and drop the program. */
static int supports(hetpipe_device *device, const void *graph, uint64_t nbytes, hetpipe_error *error)
{
    hetpipe_program *program;
    int status = compile(device, graph, nbytes, &program, error);
    if (status == HETPIPE_OK)
        release_program(program);
    return status;
}

/* --------------------------------------------------------- running, on the thread */

static int execute(const job *j, tensor *tensors, tensor *results, char *block, hetpipe_error *error)
{
    const hetpipe_program *p = j->program;
    uint32_t n, i, input = 0;
    for (i = 0; i < p->result_count; i++) {
        results[i] = p->results[i];
        results[i].data = block + p->offset[i];
    }
    for (n = 0; n < p->graph->nodes; n++) {
        const hetpipe_node *node = &p->graph->node[n];
        tensors[n] = p->tensors[n];
        if (node->op == HETPIPE_INPUT) {
            tensors[n].data = j->inputs[input++]->data;
        } else if (node->op == HETPIPE_ITEM) {
            tensors[n] = results[p->first[node->of] + node->item];
        } else if (node->op == HETPIPE_CALL) {
            call c;
            int status;
            c.operation = p->operations[n];
            c.node = node;
            c.tensors = tensors;
            c.results = &results[p->first[n]];
            c.dry = 0;
            c.error = error;
            if ((status = c.operation->run(&c)) != HETPIPE_OK)
                return status;
            tensors[n] = *c.results;
        } else {
            /* All inputs have been read: a donated input may now become an output. */
            for (i = 0; i < node->outputs; i++)
                memcpy(j->outputs[i]->data, tensors[node->output[i]].data,
                       (size_t)j->outputs[i]->nbytes);
        }
    }
    return HETPIPE_OK;
}

static int run_program(const job *j, hetpipe_error *error)
{
    const hetpipe_program *p = j->program;
    tensor *tensors = calloc(p->graph->nodes, sizeof *tensors);
    tensor *results = calloc(p->result_count + 1u, sizeof *results);
    char *block = take(p->device, p->block_nbytes);
    int status = tensors && results && block ? execute(j, tensors, results, block, error)
                                             : fail(error, "out of memory for the values of a graph");
    if (block)
        give(p->device, block, p->block_nbytes);
    free(tensors);
    free(results);
    return status;
}

static void free_job(job *j)
{
    if (!j)
        return;
    free(j->inputs);
    free(j->outputs);
    free(j->after);
    free(j);
}

static void do_job(job *j)
{
    hetpipe_device *device = j->event->device;
    hetpipe_error error = {{0}};
    int status = HETPIPE_OK;
    uint32_t i;
    pthread_mutex_lock(&device->lock);
    for (i = 0; i < j->after_count; i++) { /* earlier jobs in this queue, which have all ended */
        if (status == HETPIPE_OK && j->after[i]->status != HETPIPE_OK) {
            status = j->after[i]->status;
            error = j->after[i]->error;
        }
    }
    pthread_mutex_unlock(&device->lock);
    if (status == HETPIPE_OK && j->program)
        status = run_program(j, &error);
    else if (status == HETPIPE_OK)
        memcpy(j->to, j->from, j->nbytes);
    pthread_mutex_lock(&device->lock);
    j->event->status = status;
    j->event->error = error;
    j->event->ended = 1; /* from here on the host may give back everything that the job used */
    pthread_cond_broadcast(&device->changed);
    pthread_mutex_unlock(&device->lock);
    free_job(j);
}

static void *serve(void *argument)
{
    hetpipe_device *device = argument;
    job *j;
    for (;;) {
        pthread_mutex_lock(&device->lock);
        while (!device->first && !device->closing)
            pthread_cond_wait(&device->changed, &device->lock);
        j = device->first;
        if (j && !(device->first = j->next))
            device->last = NULL;
        pthread_mutex_unlock(&device->lock);
        if (!j)
            return NULL;
        do_job(j);
    }
}

/* ---------------------------------------------------- queueing work, on host threads */

/* Give the job to the device's thread; fail if there is no memory for its event. */
static int enqueue(hetpipe_device *device, job *j, hetpipe_event **event, hetpipe_error *error)
{
    j->event = calloc(1, sizeof *j->event);
    if (!j->event)
        return fail(error, "out of memory");
    j->event->device = device;
    *event = j->event;
    pthread_mutex_lock(&device->lock);
    if (device->last)
        device->last->next = j;
    else
        device->first = j;
    device->last = j;
    pthread_cond_broadcast(&device->changed);
    pthread_mutex_unlock(&device->lock);
    return HETPIPE_OK;
}

static int queue_copy(hetpipe_device *device, void *to, const void *from, uint64_t nbytes,
                      hetpipe_event **event, hetpipe_error *error)
{
    job *j = calloc(1, sizeof *j);
    int status;
    if (!j)
        return fail(error, "out of memory");
    j->to = to;
    j->from = from;
    j->nbytes = (size_t)nbytes;
    status = enqueue(device, j, event, error);
    if (status != HETPIPE_OK)
        free_job(j);
    return status;
}

static int upload(hetpipe_buffer *dst, const void *src, uint64_t nbytes, hetpipe_event **event,
                  hetpipe_error *error)
{
    return queue_copy(dst->device, dst->data, src, nbytes, event, error);
}

static int download(hetpipe_buffer *src, void *dst, uint64_t nbytes, hetpipe_event **event,
                    hetpipe_error *error)
{
    return queue_copy(src->device, dst, src->data, nbytes, event, error);
}

static int is_input(const job *j, const hetpipe_buffer *buffer)
{
    uint32_t i;
    for (i = 0; i < j->program->inputs; i++)
        if (j->inputs[i] == buffer)
            return 1;
    return 0;
}

/* Set the buffer of output k: an unused donated input of the same size, or a new buffer. */
static int output_buffer(job *j, uint32_t k, const uint8_t *donated, hetpipe_error *error)
{
    const hetpipe_program *p = j->program;
    const tensor *t = &p->tensors[p->graph->node[p->graph->nodes - 1].output[k]];
    uint64_t nbytes = (uint64_t)elements(t) * hetpipe_dtype_nbytes(t->dtype);
    uint32_t i, earlier;
    for (i = 0; i < p->inputs; i++) {
        for (earlier = 0; earlier < k && j->outputs[earlier] != j->inputs[i]; earlier++)
            ;
        if (donated[i] && earlier == k && j->inputs[i]->nbytes == nbytes) {
            j->outputs[k] = j->inputs[i];
            return HETPIPE_OK;
        }
    }
    return allocate(p->device, nbytes, &j->outputs[k], error);
}

static int prepare_job(job *j, hetpipe_buffer *const *inputs, const uint8_t *donated,
                       uint32_t outputs, hetpipe_event *const *after, hetpipe_error *error)
{
    uint32_t i;
    int status = HETPIPE_OK;
    j->inputs = calloc(j->program->inputs + 1u, sizeof *j->inputs);
    j->outputs = calloc(outputs + 1u, sizeof *j->outputs);
    j->after = calloc(j->after_count + 1u, sizeof *j->after);
    if (!j->inputs || !j->outputs || !j->after)
        return fail(error, "out of memory");
    for (i = 0; i < j->after_count; i++)
        j->after[i] = after[i];
    for (i = 0; i < j->program->inputs; i++)
        j->inputs[i] = inputs[i];
    for (i = 0; i < outputs && status == HETPIPE_OK; i++)
        status = output_buffer(j, i, donated, error);
    return status;
}

static int run(hetpipe_program *p, uint32_t queue, hetpipe_buffer *const *inputs,
               const uint8_t *donated, hetpipe_buffer **outputs, hetpipe_event *const *after,
               uint32_t after_count, hetpipe_event **event, hetpipe_error *error)
{
    uint32_t count = p->graph->node[p->graph->nodes - 1].outputs, k;
    job *j = calloc(1, sizeof *j);
    int status;
    (void)queue; /* the device has only one */
    if (!j)
        return fail(error, "out of memory");
    j->program = p;
    j->after_count = after_count;
    status = prepare_job(j, inputs, donated, count, after, error);
    for (k = 0; status == HETPIPE_OK && k < count; k++)
        outputs[k] = j->outputs[k];
    if (status == HETPIPE_OK) /* after this the thread owns the job, and may end it at any time */
        status = enqueue(p->device, j, event, error);
    if (status == HETPIPE_OK)
        return status;
    for (k = 0; j->outputs && k < count && j->outputs[k]; k++)
        if (!is_input(j, j->outputs[k]))
            free_buffer(j->outputs[k]);
    free_job(j);
    return status;
}

static int wait_for(hetpipe_event *event, double timeout_s, hetpipe_error *error)
{
    hetpipe_device *device = event->device;
    struct timespec end;
    double limit_s = fmin(timeout_s, 1e6), whole = floor(limit_s);
    int status, late = 0;
    clock_gettime(CLOCK_MONOTONIC, &end);
    end.tv_sec += (time_t)whole;
    end.tv_nsec += (long)((limit_s - whole) * 1e9);
    if (end.tv_nsec >= 1000000000) {
        end.tv_sec++;
        end.tv_nsec -= 1000000000;
    }
    pthread_mutex_lock(&device->lock);
    while (!event->ended && !late && timeout_s > 0)
        late = pthread_cond_timedwait(&device->changed, &device->lock, &end);
    status = event->ended ? event->status : HETPIPE_NOT_YET;
    if (status != HETPIPE_OK && status != HETPIPE_NOT_YET)
        *error = event->error;
    pthread_mutex_unlock(&device->lock);
    return status;
}

static void release_event(hetpipe_event *event)
{
    free(event);
}

/* ------------------------------------------------------------------ opening, closing */

static int open_device(uint32_t index, hetpipe_device **out, hetpipe_error *error)
{
    hetpipe_device *device;
    pthread_condattr_t monotonic;
    if (index >= DEVICES)
        return fail(error, "there is no such device");
    device = calloc(1, sizeof *device);
    if (!device)
        return fail(error, "out of memory");
    pthread_mutex_init(&device->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC); /* the clock of `wait_for` */
    pthread_cond_init(&device->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    if (pthread_create(&device->thread, NULL, serve, device)) {
        pthread_cond_destroy(&device->changed);
        pthread_mutex_destroy(&device->lock);
        free(device);
        return fail(error, "no thread for the queue");
    }
    *out = device;
    return HETPIPE_OK;
}

static void close_device(hetpipe_device *device)
{
    pthread_mutex_lock(&device->lock);
    device->closing = 1;
    pthread_cond_broadcast(&device->changed);
    pthread_mutex_unlock(&device->lock);
    pthread_join(device->thread, NULL);
    pthread_cond_destroy(&device->changed);
    pthread_mutex_destroy(&device->lock);
    free(device);
}

HETPIPE_EXPORT const hetpipe_backend *hetpipe_backend_entry(uint32_t host_version)
{
    static const hetpipe_backend table = {
        .abi_version = HETPIPE_ABI_VERSION,
        .struct_size = sizeof(hetpipe_backend),
        .name = "example",
        .count = count_devices,
        .describe = describe,
        .open = open_device,
        .close = close_device,
        .allocate = allocate,
        .free = free_buffer,
        .upload = upload,
        .download = download,
        .compile = compile,
        .release_program = release_program,
        .run = run,
        .wait = wait_for,
        .release_event = release_event,
        .supports = supports,
        .memory_used = memory_used,
    };
    return host_version == HETPIPE_ABI_VERSION ? &table : NULL;
}
