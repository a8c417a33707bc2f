/* Runs a library without Python: once, many times, or on damaged graphs.
 *
 *   replay LIBRARY GRAPH [INPUT...]             run a serialised graph. Each INPUT is a file with
 *                                               the bytes of a tensor; missing inputs are zeros.
 *                                               Outputs go to GRAPH.0, GRAPH.1, ...
 *   replay --cycles N LIBRARY GRAPH [INPUT...]  load, open, compile, run, close, unload: N times;
 *                                               then print how much the process's memory has grown
 *   replay --fuzz LIBRARY CASES                 compile every graph of a file, and run the small
 *                                               accepted ones on zeros. In the file, each graph
 *                                               follows its length: 4 bytes, little-endian.
 *
 * Built with sanitizers, like the library (make sanitized), it finds accesses outside a buffer, use
 * of freed memory, leaks and overflows. */
#define _POSIX_C_SOURCE 200809L
#include "hetpipe_backend.h"
#include "hetpipe_graph.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SMALL 4096 /* most elements of a tensor in a fuzzed graph that is run */
#define WAIT_S 60.0

typedef struct bytes {
    uint8_t *data;
    size_t nbytes;
} bytes;

static void give_up(const char *doing, const char *reason)
{
    fprintf(stderr, "replay: %s: %s\n", doing, reason);
    exit(1);
}

static void *memory(size_t nbytes)
{
    void *data = calloc(1, nbytes ? nbytes : 1);
    if (!data)
        give_up("memory", "there is not enough");
    return data;
}

static bytes read_file(const char *path)
{
    FILE *file = fopen(path, "rb");
    bytes content;
    long end;
    if (!file || fseek(file, 0, SEEK_END) || (end = ftell(file)) < 0 || fseek(file, 0, SEEK_SET))
        give_up(path, "it cannot be read");
    content.nbytes = (size_t)end;
    content.data = memory(content.nbytes);
    if (fread(content.data, 1, content.nbytes, file) != content.nbytes)
        give_up(path, "it cannot be read");
    fclose(file);
    return content;
}

static void write_file(const char *path, unsigned number, bytes content)
{
    char name[4096];
    FILE *file;
    snprintf(name, sizeof name, "%s.%u", path, number);
    file = fopen(name, "wb");
    if (!file || fwrite(content.data, 1, content.nbytes, file) != content.nbytes || fclose(file))
        give_up(name, "it cannot be written");
}

static void check(int status, const char *doing, const hetpipe_error *error)
{
    if (status != HETPIPE_OK)
        give_up(doing, error->text);
}

/* Wait for an event, give it back, and return the status of its work; NULL: it has ended. */
static int finish(const hetpipe_backend *b, hetpipe_event *event, hetpipe_error *error)
{
    int status;
    if (!event)
        return HETPIPE_OK;
    status = b->wait(event, WAIT_S, error);
    if (status == HETPIPE_NOT_YET)
        give_up("an event", "it has not happened within a minute");
    b->release_event(event);
    return status;
}

static size_t form_nbytes(const hetpipe_form *form)
{
    return (size_t)hetpipe_elements(form) * hetpipe_dtype_nbytes(form->dtype);
}

/* Run a program on `inputs`, one per input node, and fill `outputs`. */
static int run(const hetpipe_backend *b, hetpipe_device *device, hetpipe_program *program,
               const hetpipe_graph *graph, const bytes *inputs, bytes *outputs, hetpipe_error *error)
{
    const hetpipe_node *last = &graph->node[graph->nodes - 1];
    hetpipe_buffer **in = memory(graph->nodes * sizeof *in);
    hetpipe_buffer **out = memory((last->outputs + 1u) * sizeof *out);
    hetpipe_event **uploaded = memory(graph->nodes * sizeof *uploaded), *event = NULL;
    uint8_t *donated = memory(graph->nodes);
    uint32_t n, i = 0, after = 0, k;
    int status;
    for (n = 0; n < graph->nodes; n++) {
        hetpipe_event *copied = NULL;
        if (graph->node[n].op != HETPIPE_INPUT)
            continue;
        check(b->allocate(device, inputs[i].nbytes, &in[i], error), "allocate", error);
        if (inputs[i].nbytes)
            check(b->upload(in[i], inputs[i].data, inputs[i].nbytes, &copied, error), "upload", error);
        if (copied)
            uploaded[after++] = copied;
        i++;
    }
    status = b->run(program, 0, in, donated, out, uploaded, after, &event, error);
    if (status == HETPIPE_OK)
        status = finish(b, event, error);
    for (k = 0; status == HETPIPE_OK && k < last->outputs; k++) {
        outputs[k].nbytes = form_nbytes(&graph->node[last->output[k]].forms[0]);
        outputs[k].data = memory(outputs[k].nbytes);
        event = NULL;
        if (outputs[k].nbytes)
            check(b->download(out[k], outputs[k].data, outputs[k].nbytes, &event, error), "download", error);
        check(finish(b, event, error), "download", error);
    }
    for (k = 0; k < after; k++)
        finish(b, uploaded[k], error);
    for (k = 0; k < last->outputs; k++)
        if (out[k])
            b->free(out[k]);
    for (k = 0; k < i; k++)
        b->free(in[k]);
    free(in);
    free(out);
    free(uploaded);
    free(donated);
    return status;
}

static const hetpipe_backend *load(const char *path, void **library)
{
    const hetpipe_backend *(*entry)(uint32_t);
    const hetpipe_backend *table;
    void *symbol;
    *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!*library)
        give_up(path, dlerror());
    symbol = dlsym(*library, "hetpipe_backend_entry");
    if (!symbol)
        give_up(path, "it does not export hetpipe_backend_entry");
    memcpy(&entry, &symbol, sizeof entry); /* C cannot cast a data pointer to a function pointer */
    table = entry(HETPIPE_ABI_VERSION);
    if (!table || table->abi_version != HETPIPE_ABI_VERSION || table->struct_size < sizeof *table)
        give_up(path, "it has another version of the interface");
    return table;
}

static hetpipe_graph *read_graph(bytes content, const char *path)
{
    hetpipe_error error;
    hetpipe_graph *graph = hetpipe_graph_read(content.data, content.nbytes, error.text, sizeof error.text);
    if (!graph)
        give_up(path, error.text);
    return graph;
}

/* Return the contents of the inputs, one per input node: from files, then zeros. */
static bytes *read_inputs(const hetpipe_graph *graph, char **files, int count)
{
    bytes *inputs = memory(graph->nodes * sizeof *inputs);
    uint32_t n;
    int i = 0;
    for (n = 0; n < graph->nodes; n++) {
        size_t nbytes;
        if (graph->node[n].op != HETPIPE_INPUT)
            continue;
        nbytes = form_nbytes(&graph->node[n].forms[0]);
        if (i < count)
            inputs[i] = read_file(files[i]);
        else
            inputs[i].data = memory(inputs[i].nbytes = nbytes);
        if (inputs[i].nbytes != nbytes)
            give_up(files[i], "it has another size than the input");
        i++;
    }
    return inputs;
}

static void free_all(bytes *list, uint32_t count)
{
    uint32_t i;
    for (i = 0; i < count; i++)
        free(list[i].data);
    free(list);
}

static long resident_kib(void)
{
    long pages = 0, whole;
    FILE *file = fopen("/proc/self/statm", "r");
    if (!file || fscanf(file, "%ld %ld", &whole, &pages) != 2)
        pages = 0;
    if (file)
        fclose(file);
    return pages * (sysconf(_SC_PAGESIZE) / 1024);
}

static void cycle(const char *path, bytes serialised, const hetpipe_graph *graph, const bytes *inputs,
                  const char *out)
{
    uint32_t count = graph->node[graph->nodes - 1].outputs, k;
    bytes *outputs = memory((count + 1u) * sizeof *outputs);
    hetpipe_error error = {{0}};
    hetpipe_program *program;
    hetpipe_device *device;
    void *library;
    const hetpipe_backend *b = load(path, &library);
    check(b->open(0, &device, &error), "open", &error);
    check(b->compile(device, serialised.data, serialised.nbytes, &program, &error), "compile", &error);
    check(run(b, device, program, graph, inputs, outputs, &error), "run", &error);
    for (k = 0; out && k < count; k++)
        write_file(out, k, outputs[k]);
    b->release_program(program);
    b->close(device);
    dlclose(library);
    free_all(outputs, count);
}

static int cycles(long n, char **arguments, int count)
{
    bytes serialised = read_file(arguments[1]);
    hetpipe_graph *graph = read_graph(serialised, arguments[1]);
    bytes *inputs = read_inputs(graph, arguments + 2, count - 2);
    long i, before = 0;
    for (i = 0; i < n; i++) {
        cycle(arguments[0], serialised, graph, inputs, n == 1 ? arguments[1] : NULL);
        if (i == n / 10)
            before = resident_kib();
    }
    if (n > 1)
        printf("%ld cycles; from cycle %ld on the process has grown by %ld KiB, of %ld KiB\n", n, n / 10,
               resident_kib() - before, before);
    free_all(inputs, graph->nodes);
    hetpipe_graph_free(graph);
    free(serialised.data);
    return 0;
}

static int is_small(const hetpipe_graph *graph)
{
    uint32_t n, k;
    for (n = 0; n < graph->nodes; n++)
        for (k = 0; k < graph->node[n].results; k++)
            if (hetpipe_elements(&graph->node[n].forms[k]) > SMALL)
                return 0;
    return 1;
}

/* Return 0 if the library refuses a graph, 1 if it compiles it, and 2 if the graph was also run. */
static int try_graph(const hetpipe_backend *b, hetpipe_device *device, bytes serialised)
{
    hetpipe_error error = {{0}};
    hetpipe_program *program;
    hetpipe_graph *graph;
    bytes *inputs, *outputs;
    int result = 1;
    if (b->compile(device, serialised.data, serialised.nbytes, &program, &error) != HETPIPE_OK) {
        if (!error.text[0])
            give_up("compile", "it fails without a reason");
        return 0;
    }
    graph = read_graph(serialised, "a graph that the library has compiled");
    if (is_small(graph)) {
        inputs = read_inputs(graph, NULL, 0);
        outputs = memory((graph->node[graph->nodes - 1].outputs + 1u) * sizeof *outputs);
        run(b, device, program, graph, inputs, outputs, &error); /* a failure is fine */
        free_all(inputs, graph->nodes);
        free_all(outputs, graph->node[graph->nodes - 1].outputs);
        result = 2;
    }
    b->release_program(program);
    hetpipe_graph_free(graph);
    return result;
}

static int fuzz(const char *path, const char *cases)
{
    bytes content = read_file(cases), one;
    size_t at = 0;
    long counts[3] = {0, 0, 0};
    hetpipe_error error = {{0}};
    hetpipe_device *device;
    void *library;
    const hetpipe_backend *b = load(path, &library);
    check(b->open(0, &device, &error), "open", &error);
    while (content.nbytes - at >= 4) {
        const uint8_t *length = content.data + at;
        uint32_t nbytes = length[0] | (uint32_t)length[1] << 8 | (uint32_t)length[2] << 16 |
                          (uint32_t)length[3] << 24;
        at += 4;
        if (nbytes > content.nbytes - at)
            give_up(cases, "its last graph has no end");
        one.nbytes = nbytes;
        one.data = memory(nbytes); /* separate, so that a sanitizer sees a read past it */
        memcpy(one.data, content.data + at, nbytes);
        counts[try_graph(b, device, one)]++;
        free(one.data);
        at += nbytes;
    }
    b->close(device);
    dlclose(library);
    free(content.data);
    printf("%ld graphs: %ld refused, %ld compiled, %ld of them run\n", counts[0] + counts[1] + counts[2],
           counts[0], counts[1] + counts[2], counts[2]);
    return 0;
}

int main(int count, char **arguments)
{
    if (count == 4 && !strcmp(arguments[1], "--fuzz"))
        return fuzz(arguments[2], arguments[3]);
    if (count >= 5 && !strcmp(arguments[1], "--cycles") && atol(arguments[2]) > 0)
        return cycles(atol(arguments[2]), arguments + 3, count - 3);
    if (count >= 3 && arguments[1][0] != '-')
        return cycles(1, arguments + 1, count - 1);
    fprintf(stderr, "replay [--cycles N] LIBRARY GRAPH [INPUT...] | replay --fuzz LIBRARY CASES\n");
    return 2;
}
