/* Shared by the operators of the example: tensors, the arguments of a call, and a walk over
 * elements. An operator is a function of a call. It checks all arguments, returns if the call is
 * `dry` (when a graph is compiled), and otherwise computes. So a graph that would read or write
 * outside a tensor is refused when it is compiled, and each check stands beside the code that
 * relies on it. */
#ifndef OPERATORS_H
#define OPERATORS_H

#include "hetpipe_backend.h"
#include "hetpipe_graph.h"

/* A tensor in row-major order; without data while a graph is compiled. */
typedef struct tensor {
    uint8_t dtype, rank;
    const int64_t *size; /* [rank] */
    void *data;
} tensor;

typedef struct operation operation;

/* A call of an operator. */
typedef struct call {
    const operation *operation;
    const hetpipe_node *node;
    const tensor *tensors; /* by number of the node in the graph */
    const tensor *results; /* [node->results] */
    int dry;               /* check only */
    hetpipe_error *error;
} call;

typedef double real_function(double a, double b, double c);
typedef int64_t whole_function(int64_t a, int64_t b, int64_t c);

/* A row of the table of operators. */
struct operation {
    const char *name; /* without "aten." */
    int (*run)(const call *c);
    real_function *real;   /* function of elements, if many operators share one `run` */
    whole_function *whole; /* the same for integers, or NULL */
    int operands; /* number of operands; operators that share `run` may use it differently */
    int results;
};

/* Return the operator with a name, or NULL if the example lacks it. */
const operation *find_operation(const char *target);
extern const operation ELEMENT_OPERATIONS[], LAYER_OPERATIONS[]; /* the last row has no name */

/* Write the reason for a failure, with operator and layer, and return `code`. */
int refuse(const call *c, int code, const char *format, ...);

/* Arguments. `tensor_at` returns NULL if the argument is no tensor. `number_at` and `integer_at`
 * return `standard` if the argument is None or absent. `integers_at` copies a list or a single
 * integer and returns its length: -1 if it is None or absent, -2 if it is anything else or too
 * long. */
const tensor *tensor_at(const call *c, uint32_t place, const char *name);
double number_at(const call *c, uint32_t place, const char *name, double standard);
int64_t integer_at(const call *c, uint32_t place, const char *name, int64_t standard);
int integers_at(const call *c, uint32_t place, const char *name, int64_t *out, int most);
/* Return a dimension from 0 to rank-1, or -1 if `dim` is out of range. A negative `dim` counts from
 * the end. */
int dimension(int64_t dim, int rank);

int64_t elements(const tensor *t);
int same_form(const tensor *a, const tensor *b);
int has_form(const tensor *t, uint8_t dtype, int rank, const int64_t *size);
int is_whole(const tensor *t); /* integers or bools */
void strides_of(const tensor *t, int64_t *stride);

/* Read and write elements as numbers of C's widest types. */
double load_real(const tensor *t, int64_t at);
int64_t load_whole(const tensor *t, int64_t at);
void store_real(const tensor *t, int64_t at, double value);
void store_whole(const tensor *t, int64_t at, int64_t value);

/* A walk over all indices of a shape, in row-major order. at[i] is the current place in operand
 * i. */
typedef struct walk {
    int rank, operands;
    int64_t left, size[HETPIPE_MOST_RANK], index[HETPIPE_MOST_RANK];
    int64_t stride[4][HETPIPE_MOST_RANK], at[4];
} walk;

void walk_begin(walk *w, const tensor *shape);
int walk_broadcast(walk *w, const tensor *t); /* add an operand; 0 if it cannot be broadcast */
void walk_strides(walk *w, const int64_t *stride, int64_t first); /* add an operand with strides */
void walk_next(walk *w); /* while w->left > 0 */

#endif
