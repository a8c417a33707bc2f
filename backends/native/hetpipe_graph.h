/* A reader of serialised graphs (docs/native.md) for the authors of libraries. Copy it, with
 * hetpipe_graph.c, into your library, or write another reader.
 *
 * It trusts no byte: it checks every length, number and reference before use, and refuses a damaged
 * graph with the reason. Its memory is proportional to the number of bytes: it refuses a count that
 * the bytes cannot hold before it allocates anything.
 *
 * It checks the format, not the operators: the code that runs an operator must check that each
 * argument is present and has the type and size that the operator needs.
 */
#ifndef HETPIPE_GRAPH_H
#define HETPIPE_GRAPH_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { HETPIPE_GRAPH_VERSION = 1, HETPIPE_MOST_RANK = 32, HETPIPE_MOST_DEPTH = 8 };

/* A tensor without its elements. */
typedef struct hetpipe_form {
    uint8_t dtype; /* HETPIPE_FLOAT32, ...; 0: no tensor, for a result that is not requested */
    uint8_t rank;
    const int64_t *size; /* [rank] */
} hetpipe_form;

typedef enum hetpipe_kind {
    HETPIPE_NONE,
    HETPIPE_A_BOOL,
    HETPIPE_INTEGER,
    HETPIPE_NUMBER,
    HETPIPE_TEXT,
    HETPIPE_DTYPE,
    HETPIPE_TENSOR,
    HETPIPE_LIST
} hetpipe_kind;

/* An argument of a call. */
typedef struct hetpipe_value {
    hetpipe_kind kind;
    uint32_t count;      /* items of a list */
    union {
        int64_t integer; /* also for a bool, 0 or 1, and for a dtype */
        double number;
        const char *text;
        uint32_t node; /* for a tensor: an earlier node */
        const struct hetpipe_value *items;
    } of;
} hetpipe_value;

typedef enum hetpipe_op { HETPIPE_INPUT = 1, HETPIPE_CALL, HETPIPE_ITEM, HETPIPE_OUTPUT } hetpipe_op;

typedef struct hetpipe_node {
    hetpipe_op op;
    const char *name;
    const char *layer;           /* layer of the user's model; NULL if unknown */
    const char *target;          /* call: the operator, such as "aten.mm.default" */
    uint32_t args, kwargs;       /* call: numbers of positional and of keyword arguments */
    const hetpipe_value *values; /* [args + kwargs] */
    const char *const *names;    /* [kwargs]: names[i] is the keyword of values[args + i] */
    uint32_t results;            /* number of forms: 1, or more for a call with several results */
    uint8_t several;             /* call: 1 if it returns a tuple, whose results items take */
    const hetpipe_form *forms;   /* [results] */
    uint32_t of, item;           /* item: result number `item` of node `of` */
    uint8_t steady;              /* input: a weight, the same buffer for many runs in a row */
    uint8_t checked, ignores;    /* input: the host has checked that its integers are in
                                    low..size-1, or equal `ignored` if `ignores` is 1 */
    int64_t low, size, ignored;
    uint32_t outputs;            /* output: number of nodes in `output` */
    const uint32_t *output;      /* [outputs]: nodes */
} hetpipe_node;

typedef struct hetpipe_graph {
    uint32_t nodes;
    const hetpipe_node *node; /* [nodes]; the last one is the output */
} hetpipe_graph;

/* Read the graph in the `nbytes` bytes at `data`; the graph keeps no pointer to them. If they are
 * damaged, write the reason to `error`, at most `error_size` bytes, and return NULL. */
hetpipe_graph *hetpipe_graph_read(const void *data, size_t nbytes, char *error, size_t error_size);
void hetpipe_graph_free(hetpipe_graph *graph);

/* Return the positional argument `place` of a call, or else the keyword argument `name`, or
 * NULL. */
const hetpipe_value *hetpipe_argument(const hetpipe_node *call, uint32_t place, const char *name);

/* Return the number of elements of a form, less than 2^60. */
int64_t hetpipe_elements(const hetpipe_form *form);

/* Return the bytes of an element; 0 for an unknown code. */
size_t hetpipe_dtype_nbytes(uint8_t dtype);

#ifdef __cplusplus
}
#endif

#endif
