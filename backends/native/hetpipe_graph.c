/* The reader of serialised graphs that hetpipe_graph.h describes. */
#include "hetpipe_graph.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef HETPIPE_GRAPH_CHUNK
#define HETPIPE_GRAPH_CHUNK 16384 /* bytes of a piece of memory; 0: one piece per allocation */
#endif

enum { HEADER = 32, CHECKED_FROM = 20 };
#define NO_LAYER 0xFFFFFFFFu
#define MOST_ELEMENTS ((int64_t)1 << 59) /* the bytes of a tensor then fit into 63 bits */

/* Memory that is freed as a whole: a list of pieces, each filled from its front. */
typedef struct piece {
    struct piece *next;
    size_t used, size;
} piece;

typedef struct whole_graph { /* hetpipe_graph_read returns its first member */
    hetpipe_graph graph;
    piece *pieces;
} whole_graph;

typedef struct reader {
    const uint8_t *start, *at, *end;
    const char **strings;
    uint32_t string_count;
    hetpipe_node *nodes;
    uint32_t node_count; /* read so far */
    piece **pieces;
    char *error;
    size_t error_size;
    int failed; /* never reset: callers may continue with zeros until they check it */
} reader;

static void fail(reader *r, const char *format, ...)
{
    va_list values;
    if (r->failed)
        return;
    r->failed = 1;
    va_start(values, format);
    if (r->error_size)
        vsnprintf(r->error, r->error_size, format, values);
    va_end(values);
}

/* Return zeroed memory for `count` objects of `size` bytes. The caller has checked that the
 * remaining bytes of the graph can hold so many. */
static void *take(reader *r, size_t count, size_t size)
{
    piece *p = *r->pieces;
    size_t nbytes = (count * size + 15) / 16 * 16;
    void *memory;
    if (!p || p->size - p->used < nbytes) {
        size_t room = nbytes > HETPIPE_GRAPH_CHUNK ? nbytes : HETPIPE_GRAPH_CHUNK;
        p = calloc(1, (sizeof *p + 15) / 16 * 16 + room);
        if (!p) {
            fail(r, "no memory for a graph: %lu bytes", (unsigned long)room);
            return NULL;
        }
        p->next = *r->pieces;
        p->size = room;
        *r->pieces = p;
    }
    memory = (char *)p + (sizeof *p + 15) / 16 * 16 + p->used;
    p->used += nbytes;
    return memory;
}

static size_t left(const reader *r)
{
    return (size_t)(r->end - r->at);
}

static uint64_t number(reader *r, unsigned nbytes)
{
    uint64_t value = 0;
    unsigned i;
    if (left(r) < nbytes) {
        fail(r, "the graph is damaged: it ends within a number");
        r->at = r->end;
        return 0;
    }
    for (i = 0; i < nbytes; i++)
        value |= (uint64_t)r->at[i] << (8 * i);
    r->at += nbytes;
    return value;
}

static uint8_t read_u8(reader *r) { return (uint8_t)number(r, 1); }
static uint32_t read_u32(reader *r) { return (uint32_t)number(r, 4); }

static int64_t read_i64(reader *r)
{
    uint64_t bits = number(r, 8);
    int64_t value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static double read_f64(reader *r)
{
    uint64_t bits = number(r, 8);
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Read a count of entries, each of at least `nbytes` bytes. */
static uint32_t read_count(reader *r, size_t nbytes)
{
    uint32_t count = read_u32(r);
    if (count > left(r) / nbytes) {
        fail(r, "the graph is damaged: it counts %lu entries, with %lu bytes left",
             (unsigned long)count, (unsigned long)left(r));
        return 0;
    }
    return count;
}

static const char *read_string(reader *r)
{
    uint32_t i = read_u32(r);
    if (i < r->string_count)
        return r->strings[i];
    fail(r, "the graph is damaged: it names string %lu of %lu", (unsigned long)i,
         (unsigned long)r->string_count);
    return "";
}

static uint8_t read_dtype(reader *r)
{
    uint8_t dtype = read_u8(r);
    if (!hetpipe_dtype_nbytes(dtype))
        fail(r, "the graph is damaged: a dtype has the code %d", (int)dtype);
    return dtype;
}

/* Read the number of a node with one result, a tensor. */
static uint32_t read_node(reader *r)
{
    uint32_t i = read_u32(r);
    if (i < r->node_count && r->nodes[i].op != HETPIPE_OUTPUT && !r->nodes[i].several &&
        r->nodes[i].forms[0].dtype)
        return i;
    fail(r, "the graph is damaged: node %lu reads node %lu, which is no tensor",
         (unsigned long)r->node_count, (unsigned long)i);
    return 0;
}

static void read_form(reader *r, hetpipe_form *form)
{
    int64_t elements = 1, *size;
    uint8_t i;
    form->dtype = read_u8(r);
    form->rank = read_u8(r);
    if (!form->dtype && !form->rank)
        return;
    if (!hetpipe_dtype_nbytes(form->dtype) || form->rank > HETPIPE_MOST_RANK) {
        fail(r, "the graph is damaged: a tensor has dtype %d and %d dimensions", (int)form->dtype,
             (int)form->rank);
        return;
    }
    size = take(r, form->rank, sizeof *size);
    form->size = size;
    for (i = 0; size && i < form->rank; i++) {
        size[i] = read_i64(r);
        if (size[i] < 0 || (size[i] && elements > MOST_ELEMENTS / size[i])) {
            fail(r, "the graph is damaged: a tensor is too large");
            return;
        }
        elements *= size[i] ? size[i] : 1;
    }
}

static void read_value(reader *r, hetpipe_value *value, int depth)
{
    uint8_t kind = read_u8(r);
    hetpipe_value *items;
    uint32_t i;
    value->kind = (hetpipe_kind)kind;
    switch (kind) {
    case HETPIPE_NONE:
        break;
    case HETPIPE_A_BOOL:
        value->of.integer = read_u8(r);
        if (value->of.integer > 1)
            fail(r, "the graph is damaged: a bool is 0 or 1, not %d", (int)value->of.integer);
        break;
    case HETPIPE_INTEGER:
        value->of.integer = read_i64(r);
        break;
    case HETPIPE_NUMBER:
        value->of.number = read_f64(r);
        break;
    case HETPIPE_TEXT:
        value->of.text = read_string(r);
        break;
    case HETPIPE_DTYPE:
        value->of.integer = read_dtype(r);
        break;
    case HETPIPE_TENSOR:
        value->of.node = read_node(r);
        break;
    case HETPIPE_LIST:
        if (depth == HETPIPE_MOST_DEPTH) {
            fail(r, "the graph is damaged: its lists are deeper than %d", HETPIPE_MOST_DEPTH);
            break;
        }
        value->count = read_count(r, 1);
        items = take(r, value->count, sizeof *items);
        value->of.items = items;
        for (i = 0; items && i < value->count && !r->failed; i++)
            read_value(r, &items[i], depth + 1);
        break;
    default:
        fail(r, "the graph is damaged: an argument is of kind %d", (int)kind);
    }
}

static void read_forms(reader *r, hetpipe_node *node, uint32_t count)
{
    hetpipe_form *forms = take(r, count, sizeof *forms);
    uint32_t i;
    node->results = count;
    node->forms = forms;
    for (i = 0; forms && i < count && !r->failed; i++)
        read_form(r, &forms[i]);
}

static void read_input(reader *r, hetpipe_node *node)
{
    uint8_t flags = read_u8(r);
    if (flags > 7 || (flags & 6) == 4)
        fail(r, "the graph is damaged: an input has the flags %d", (int)flags);
    node->steady = flags & 1;
    node->checked = (flags & 2) != 0;
    node->ignores = (flags & 4) != 0;
    if (node->checked) {
        node->low = read_i64(r);
        node->size = read_i64(r);
    }
    if (node->ignores)
        node->ignored = read_i64(r);
    read_forms(r, node, 1);
}

static void read_call(reader *r, hetpipe_node *node)
{
    const char **names;
    hetpipe_value *args, *kwargs, *values;
    uint32_t i;
    node->target = read_string(r);
    node->args = read_count(r, 1);
    args = take(r, node->args, sizeof *args);
    for (i = 0; args && i < node->args && !r->failed; i++)
        read_value(r, &args[i], 0);
    node->kwargs = read_count(r, 5);
    names = take(r, node->kwargs, sizeof *names);
    kwargs = take(r, node->kwargs, sizeof *kwargs);
    for (i = 0; names && kwargs && i < node->kwargs && !r->failed; i++) {
        names[i] = read_string(r);
        read_value(r, &kwargs[i], 0);
    }
    values = take(r, (size_t)node->args + node->kwargs, sizeof *values);
    if (args && kwargs && values) {
        memcpy(values, args, node->args * sizeof *values);
        memcpy(values + node->args, kwargs, node->kwargs * sizeof *values);
    }
    node->values = values;
    node->names = names;
    node->several = read_u8(r);
    if (node->several > 1)
        fail(r, "the graph is damaged: a bool is 0 or 1, not %d", (int)node->several);
    read_forms(r, node, node->several ? read_count(r, 2) : 1);
}

static void read_item(reader *r, hetpipe_node *node)
{
    node->of = read_u32(r);
    node->item = read_u32(r);
    if (node->of >= r->node_count || !r->nodes[node->of].several ||
        node->item >= r->nodes[node->of].results)
        fail(r, "the graph is damaged: node %lu has no item %lu", (unsigned long)node->of,
             (unsigned long)node->item);
    read_forms(r, node, 1);
}

static void read_output(reader *r, hetpipe_node *node)
{
    uint32_t i, *output;
    node->outputs = read_count(r, 4);
    output = take(r, node->outputs, sizeof *output);
    node->output = output;
    for (i = 0; output && i < node->outputs; i++)
        output[i] = read_node(r);
}

static void read_one(reader *r, hetpipe_node *node)
{
    uint8_t op = read_u8(r);
    uint32_t layer;
    node->op = (hetpipe_op)op;
    node->name = read_string(r);
    layer = read_u32(r);
    if (layer != NO_LAYER) {
        r->at -= 4;
        node->layer = read_string(r);
    }
    if (r->failed)
        return;
    switch (op) {
    case HETPIPE_INPUT:
        read_input(r, node);
        break;
    case HETPIPE_CALL:
        read_call(r, node);
        break;
    case HETPIPE_ITEM:
        read_item(r, node);
        break;
    case HETPIPE_OUTPUT:
        read_output(r, node);
        break;
    default:
        fail(r, "the graph is damaged: a node is of kind %d", (int)op);
    }
}

static uint32_t crc32(const uint8_t *data, size_t nbytes)
{
    uint32_t table[256], crc = 0xFFFFFFFFu, i;
    size_t at;
    int bit;
    for (i = 0; i < 256; i++) {
        table[i] = i;
        for (bit = 0; bit < 8; bit++)
            table[i] = table[i] & 1 ? 0xEDB88320u ^ table[i] >> 1 : table[i] >> 1;
    }
    for (at = 0; at < nbytes; at++)
        crc = table[(crc ^ data[at]) & 0xFF] ^ crc >> 8;
    return ~crc;
}

/* Copy the table of strings, so that no pointer to the caller's bytes remains. */
static void read_strings(reader *r, uint32_t count, uint32_t nbytes)
{
    char *text, *end;
    uint32_t i;
    if (nbytes > left(r) || count > nbytes || (nbytes && r->at[nbytes - 1])) {
        fail(r, "the graph is damaged: its table of strings does not fit its size");
        return;
    }
    r->string_count = count;
    r->strings = take(r, count, sizeof *r->strings);
    text = take(r, nbytes, 1);
    if (!r->strings || !text)
        return;
    memcpy(text, r->at, nbytes);
    r->at += nbytes;
    end = text + nbytes;
    for (i = 0; i < count && text < end; i++) {
        r->strings[i] = text;
        text += strlen(text) + 1;
    }
    if (i < count || text < end)
        fail(r, "the graph is damaged: it has another number of strings than it counts");
}

static void read_all(reader *r, whole_graph *whole)
{
    size_t nbytes = left(r);
    uint32_t version, length, checksum, strings, strings_nbytes, nodes;
    if (nbytes < HEADER || memcmp(r->at, "HETGRAPH", 8)) {
        fail(r, "these %lu bytes are no serialised graph", (unsigned long)nbytes);
        return;
    }
    r->at += 8;
    version = read_u32(r);
    length = read_u32(r);
    checksum = read_u32(r);
    strings = read_u32(r);
    strings_nbytes = read_u32(r);
    nodes = read_u32(r);
    if (version != HETPIPE_GRAPH_VERSION)
        fail(r, "the graph has version %lu of the serialised form, this library reads %d",
             (unsigned long)version, HETPIPE_GRAPH_VERSION);
    else if (length != nbytes)
        fail(r, "the graph is damaged: %lu bytes are here, and its header counts %lu",
             (unsigned long)nbytes, (unsigned long)length);
    else if (checksum != crc32(r->start + CHECKED_FROM, nbytes - CHECKED_FROM))
        fail(r, "the graph is damaged: its checksum does not match its content");
    if (r->failed)
        return;
    read_strings(r, strings, strings_nbytes);
    if (!r->failed && nodes > left(r) / 9)
        fail(r, "the graph is damaged: it has no room for %lu nodes", (unsigned long)nodes);
    if (r->failed)
        return;
    r->nodes = take(r, nodes, sizeof *r->nodes);
    whole->graph.node = r->nodes;
    whole->graph.nodes = nodes;
    for (; r->nodes && r->node_count < nodes && !r->failed; r->node_count++) {
        read_one(r, &r->nodes[r->node_count]);
        if (!r->failed &&
            (r->nodes[r->node_count].op == HETPIPE_OUTPUT) != (r->node_count == nodes - 1))
            fail(r, "the graph is damaged: its output is not the last node");
    }
    if (!r->failed && (!nodes || r->at != r->end))
        fail(r, "the graph is damaged: it does not end with its output");
}

hetpipe_graph *hetpipe_graph_read(const void *data, size_t nbytes, char *error, size_t error_size)
{
    whole_graph *whole = calloc(1, sizeof *whole);
    reader r;
    memset(&r, 0, sizeof r);
    r.start = r.at = data;
    r.end = r.at + nbytes;
    r.error = error;
    r.error_size = error_size;
    if (!whole) {
        fail(&r, "no memory for a graph");
        return NULL;
    }
    r.pieces = &whole->pieces;
    read_all(&r, whole);
    if (r.failed) {
        hetpipe_graph_free(&whole->graph);
        return NULL;
    }
    return &whole->graph;
}

void hetpipe_graph_free(hetpipe_graph *graph)
{
    whole_graph *whole = (whole_graph *)graph;
    piece *p, *next;
    if (!graph)
        return;
    for (p = whole->pieces; p; p = next) {
        next = p->next;
        free(p);
    }
    free(whole);
}

const hetpipe_value *hetpipe_argument(const hetpipe_node *call, uint32_t place, const char *name)
{
    uint32_t i;
    if (place < call->args)
        return &call->values[place];
    for (i = 0; i < call->kwargs; i++)
        if (!strcmp(call->names[i], name))
            return &call->values[call->args + i];
    return NULL;
}

int64_t hetpipe_elements(const hetpipe_form *form)
{
    int64_t elements = 1;
    uint8_t i;
    for (i = 0; i < form->rank; i++)
        elements *= form->size[i];
    return elements;
}

size_t hetpipe_dtype_nbytes(uint8_t dtype)
{
    static const uint8_t nbytes[] = {0, 4, 8, 2, 2, 8, 4, 2, 1, 1, 1};
    return dtype < sizeof nbytes ? nbytes[dtype] : 0;
}
