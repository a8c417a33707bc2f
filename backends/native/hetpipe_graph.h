/* A reader of serialised graphs (docs/native.md) for the authors of libraries. Copy it, with
 * hetpipe_graph.c, into yours, or read the bytes in a way of your own.
 *
 * It trusts no byte: every length, number and reference is checked before it is used, and a graph
 * that is not as the form says is refused with the reason. Its memory is in proportion to the bytes:
 * a count that they cannot hold is refused before anything is allocated for it.
 *
 * It checks the form, not the operators: whether an argument is there, and of the type and size that
 * an operator needs, is for the one who runs it to check.
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
    uint8_t dtype; /* HETPIPE_FLOAT32, ...; 0: there is no tensor, a result that nobody asked for */
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
    uint32_t count;      /* of a list */
    union {
        int64_t integer; /* also of a bool, 0 or 1, and of a dtype */
        double number;
        const char *text;
        uint32_t node; /* of a tensor: an earlier node */
        const struct hetpipe_value *items;
    } of;
} hetpipe_value;

typedef enum hetpipe_op { HETPIPE_INPUT = 1, HETPIPE_CALL, HETPIPE_ITEM, HETPIPE_OUTPUT } hetpipe_op;

typedef struct hetpipe_node {
    hetpipe_op op;
    const char *name;
    const char *layer;           /* of the user's model; NULL where none is known */
    const char *target;          /* of a call: the operator, as "aten.mm.default" */
    uint32_t args, kwargs;       /* of a call: how many, by place and by name */
    const hetpipe_value *values; /* [args + kwargs] */
    const char *const *names;    /* [kwargs]: names[i] is that of values[args + i] */
    uint32_t results;            /* forms: 1, or the number of results of a call with several */
    uint8_t several;             /* whether items take the results of the call */
    const hetpipe_form *forms;   /* [results] */
    uint32_t of, item;           /* of an item: result number `item` of node `of` */
    uint8_t steady;              /* of an input: a weight, the same buffer for many runs in a row */
    uint8_t checked, ignores;    /* of an input: its integers are in low..size-1, or `ignored` if
                                    `ignores` is 1: the host has made sure */
    int64_t low, size, ignored;
    uint32_t outputs;            /* of the output */
    const uint32_t *output;      /* [outputs]: nodes */
} hetpipe_node;

typedef struct hetpipe_graph {
    uint32_t nodes;
    const hetpipe_node *node; /* [nodes]; the last one is the output */
} hetpipe_graph;

/* The graph in `nbytes` bytes at `data`, which are not needed any more afterwards. Returns NULL and
 * writes the reason to `error`, at most `error_size` bytes, if they are damaged. */
hetpipe_graph *hetpipe_graph_read(const void *data, size_t nbytes, char *error, size_t error_size);
void hetpipe_graph_free(hetpipe_graph *graph);

/* The argument of a call at a place or, if it has not so many, of a name; NULL if it has neither. */
const hetpipe_value *hetpipe_argument(const hetpipe_node *call, uint32_t place, const char *name);

/* Elements of a form: less than 2^60. */
int64_t hetpipe_elements(const hetpipe_form *form);

/* Bytes of an element; 0 for a code that is none. */
size_t hetpipe_dtype_nbytes(uint8_t dtype);

#ifdef __cplusplus
}
#endif

#endif
