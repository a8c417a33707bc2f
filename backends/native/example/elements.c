/* Operators on elements: arithmetic, comparisons, views, reductions, indices. */
#include "operators.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { BAD = HETPIPE_UNSUPPORTED };

/* Integer arithmetic wraps around, as in torch; C leaves that undefined for int64_t. */
typedef uint64_t u;

#define REAL(name, expression)                          \
    static double name(double a, double b, double c)    \
    {                                                   \
        (void)a, (void)b, (void)c;                      \
        return expression;                              \
    }
#define WHOLE(name, expression)                               \
    static int64_t name(int64_t a, int64_t b, int64_t c)      \
    {                                                         \
        (void)a, (void)b, (void)c;                            \
        return (int64_t)(expression);                         \
    }

REAL(add, a + c * b) REAL(subtract, a - c * b) REAL(multiply, a * b) REAL(divide, a / b)
REAL(power, pow(a, b)) REAL(larger, isnan(a) || a > b ? a : b)
REAL(smaller, isnan(a) || a < b ? a : b) REAL(negate, -a) REAL(magnitude, fabs(a))
REAL(reciprocal, 1 / a) REAL(root, sqrt(a)) REAL(inverse_root, 1 / sqrt(a)) REAL(exponential, exp(a))
REAL(exponential_less_1, expm1(a)) REAL(logarithm, log(a)) REAL(logarithm_of_1_more, log1p(a))
REAL(hyperbolic_tangent, tanh(a)) REAL(sigmoid, 1 / (1 + exp(-a))) REAL(error_function, erf(a))
REAL(rectify, isnan(a) || a > 0 ? a : 0) REAL(sine, sin(a)) REAL(cosine, cos(a))
REAL(round_down, floor(a)) REAL(round_up, ceil(a)) REAL(sign, (a > 0) - (a < 0)) REAL(same, a)
REAL(choose, a != 0 ? b : c) REAL(equal, a == b) REAL(unequal, a != b) REAL(less, a < b)
REAL(at_most, a <= b) REAL(greater, a > b) REAL(at_least, a >= b) REAL(both, a != 0 && b != 0)
REAL(either, a != 0 || b != 0) REAL(not_true, a == 0) REAL(is_infinite, isinf(a) != 0)
REAL(is_nan, isnan(a) != 0)

WHOLE(whole_add, (u)a + (u)c * (u)b) WHOLE(whole_subtract, (u)a - (u)c * (u)b)
WHOLE(whole_multiply, (u)a * (u)b) WHOLE(whole_negate, 0 - (u)a)
WHOLE(whole_magnitude, a < 0 ? 0 - (u)a : (u)a) WHOLE(whole_larger, a > b ? a : b)
WHOLE(whole_smaller, a < b ? a : b) WHOLE(whole_rectify, a > 0 ? a : 0) WHOLE(whole_same, a)
WHOLE(whole_choose, a ? b : c) WHOLE(whole_equal, a == b) WHOLE(whole_unequal, a != b)
WHOLE(whole_less, a < b) WHOLE(whole_at_most, a <= b) WHOLE(whole_greater, a > b)
WHOLE(whole_at_least, a >= b) WHOLE(whole_and, a & b) WHOLE(whole_or, a | b)
WHOLE(whole_xor, a ^ b) WHOLE(whole_not, a == 0)

static double gelu(double a, double b, double c)
{
    (void)b, (void)c;
    return 0.5 * a * (1 + erf(a * 0.70710678118654752440));
}

/* Read a number among the arguments as a tensor without dimensions. */
static int scalar_at(const call *c, uint32_t place, const char *name, int64_t *room, tensor *out)
{
    const hetpipe_value *value = hetpipe_argument(c->node, place, name);
    if (!value || value->kind < HETPIPE_A_BOOL || value->kind > HETPIPE_NUMBER)
        return 0;
    out->rank = 0;
    out->size = NULL;
    out->data = room;
    out->dtype = value->kind == HETPIPE_NUMBER ? HETPIPE_FLOAT64 : HETPIPE_INT64;
    if (value->kind == HETPIPE_NUMBER)
        memcpy(room, &value->of.number, sizeof *room);
    else
        *room = value->of.integer;
    return 1;
}

/* out[i] = f(operand[0][i], operand[1][i], operand[2][i]), with all operands broadcast. */
static int map(const call *c, const tensor *operand, int count)
{
    const tensor *out = &c->results[0];
    int i, whole = c->operation->whole && is_whole(out);
    int64_t n;
    walk w;
    walk_begin(&w, out);
    for (i = 0; i < count; i++) {
        if (!walk_broadcast(&w, &operand[i]))
            return refuse(c, BAD, "operand %d does not fit the result", i);
        whole = whole && is_whole(&operand[i]);
    }
    if (!whole && !c->operation->real)
        return refuse(c, BAD, "it is of integers and bools");
    if (c->dry)
        return HETPIPE_OK;
    for (n = 0; w.left > 0; walk_next(&w), n++) {
        if (whole)
            store_whole(out, n,
                        c->operation->whole(load_whole(&operand[0], w.at[0]),
                                            count > 1 ? load_whole(&operand[1], w.at[1]) : 0,
                                            count > 2 ? load_whole(&operand[2], w.at[2]) : 0));
        else
            store_real(out, n,
                       c->operation->real(load_real(&operand[0], w.at[0]),
                                          count > 1 ? load_real(&operand[1], w.at[1]) : 0,
                                          count > 2 ? load_real(&operand[2], w.at[2]) : 0));
    }
    return HETPIPE_OK;
}

/* Operands are the first arguments: tensors or numbers. A missing `alpha` of a sum is 1. */
static int elementwise(const call *c)
{
    static const char *const names[] = {"self", "other", "other"};
    tensor operand[3];
    int64_t room[3];
    int i, count = c->operation->operands;
    for (i = 0; i < count; i++) {
        const tensor *given = tensor_at(c, (uint32_t)i, names[i]);
        if (given)
            operand[i] = *given;
        else if (!scalar_at(c, (uint32_t)i, names[i], &room[i], &operand[i]))
            return refuse(c, BAD, "argument %d is neither a tensor nor a number", i);
    }
    if (c->operation->real == add || c->operation->real == subtract) {
        if (!scalar_at(c, 2, "alpha", &room[2], &operand[2])) {
            static int64_t one = 1;
            operand[2].dtype = HETPIPE_INT64;
            operand[2].rank = 0;
            operand[2].size = NULL;
            operand[2].data = &one;
        }
        count = 3;
    }
    return map(c, operand, count);
}

static int run_gelu(const call *c)
{
    const hetpipe_value *form = hetpipe_argument(c->node, 1, "approximate");
    if (form && (form->kind != HETPIPE_TEXT || strcmp(form->of.text, "none")))
        return refuse(c, BAD, "only the exact form");
    return elementwise(c);
}

static int clamp(const call *c)
{
    const tensor *x = tensor_at(c, 0, "self"), *out = &c->results[0];
    double low = number_at(c, 1, "min", -INFINITY), high = number_at(c, 2, "max", INFINITY);
    int64_t i;
    if (!same_form(x, out) || is_whole(x))
        return refuse(c, BAD, "only of floating numbers, between numbers");
    for (i = 0; !c->dry && i < elements(out); i++) {
        double value = load_real(x, i);
        store_real(out, i, isnan(value) ? value : fmin(fmax(value, low), high));
    }
    return HETPIPE_OK;
}

/* full, full_like, scalar_tensor: one number everywhere, the argument at place `operands`. arange:
 * numbers from the first argument on, in steps. */
static int fill(const call *c)
{
    const tensor *out = &c->results[0];
    int64_t room, i, n = elements(out), step;
    tensor value;
    if (!scalar_at(c, (uint32_t)c->operation->operands, "value", &room, &value))
        return refuse(c, BAD, "it needs a number");
    for (i = 0; !c->dry && i < n; i++) {
        if (is_whole(&value))
            store_whole(out, i, load_whole(&value, 0));
        else
            store_real(out, i, load_real(&value, 0));
    }
    if (strncmp(c->operation->name, "arange", 6))
        return HETPIPE_OK;
    step = integer_at(c, 2, "step", 1);
    if (!is_whole(&value) || out->dtype != HETPIPE_INT64)
        return refuse(c, BAD, "only of integers");
    for (i = 0; !c->dry && i < n; i++)
        store_whole(out, i, (int64_t)((u)room + (u)step * (u)i));
    return HETPIPE_OK;
}

/* Copy the elements of x that a walk reaches, in the order of the result. */
static void gather_walk(const tensor *x, const tensor *out, walk *w)
{
    size_t nbytes = hetpipe_dtype_nbytes(out->dtype);
    char *to = out->data;
    for (; w->left > 0; walk_next(w), to += nbytes)
        memcpy(to, (const char *)x->data + (size_t)w->at[0] * nbytes, nbytes);
}

/* view, clone, squeeze, unsqueeze: the same elements in the same order. */
static int copy(const call *c)
{
    const tensor *x = tensor_at(c, 0, "self"), *out = &c->results[0];
    if (!x || x->dtype != out->dtype || elements(x) != elements(out))
        return refuse(c, BAD, "the result has other elements");
    if (!c->dry && elements(out))
        memcpy(out->data, x->data, (size_t)elements(out) * hetpipe_dtype_nbytes(out->dtype));
    return HETPIPE_OK;
}

static int expand(const call *c)
{
    const tensor *x = tensor_at(c, 0, "self"), *out = &c->results[0];
    walk w;
    walk_begin(&w, out);
    if (!x || x->dtype != out->dtype || !walk_broadcast(&w, x))
        return refuse(c, BAD, "the tensor cannot be expanded to the result");
    if (!c->dry)
        gather_walk(x, out, &w);
    return HETPIPE_OK;
}

static int permute(const call *c)
{
    const tensor *x = tensor_at(c, 0, "self"), *out = &c->results[0];
    int64_t dims[HETPIPE_MOST_RANK], stride[HETPIPE_MOST_RANK], moved[HETPIPE_MOST_RANK];
    int i, d, seen[HETPIPE_MOST_RANK] = {0};
    walk w;
    if (!x || x->dtype != out->dtype || x->rank != out->rank ||
        integers_at(c, 1, "dims", dims, HETPIPE_MOST_RANK) != x->rank)
        return refuse(c, BAD, "the dimensions do not fit");
    strides_of(x, stride);
    for (i = 0; i < x->rank; i++) {
        d = dimension(dims[i], x->rank);
        if (d < 0 || seen[d]++ || x->size[d] != out->size[i])
            return refuse(c, BAD, "the dimensions do not fit");
        moved[i] = stride[d];
    }
    walk_begin(&w, out);
    walk_strides(&w, moved, 0);
    if (!c->dry)
        gather_walk(x, out, &w);
    return HETPIPE_OK;
}

/* slice(x, dim, start, end, step), and select(x, dim, index), which drops the dimension. */
static int slice(const call *c)
{
    const tensor *x = tensor_at(c, 0, "self"), *out = &c->results[0];
    int selects = c->operation->operands, d = -1, i, o = 0;
    int64_t stride[HETPIPE_MOST_RANK], kept[HETPIPE_MOST_RANK], start, step = 1, first, count = 1;
    walk w;
    if (x && x->rank)
        d = dimension(integer_at(c, 1, "dim", 0), x->rank);
    if (d < 0 || x->dtype != out->dtype || out->rank != x->rank - selects)
        return refuse(c, BAD, "the dimensions do not fit");
    start = integer_at(c, 2, selects ? "index" : "start", 0);
    first = start < 0 ? start + x->size[d] : start;
    if (!selects) {
        step = integer_at(c, 4, "step", 1);
        count = out->size[d];
        first = first < 0 ? 0 : first > x->size[d] ? x->size[d] : first;
    }
    strides_of(x, stride);
    for (i = 0; i < x->rank; i++) {
        if (selects && i == d)
            continue;
        if (i != d && out->size[o] != x->size[i])
            return refuse(c, BAD, "the result has another shape");
        kept[o++] = i == d ? stride[i] * step : stride[i];
    }
    if (step < 1 || step > INT32_MAX || first < 0 ||
        (count && (first >= x->size[d] || count - 1 > (x->size[d] - 1 - first) / step)))
        return refuse(c, BAD, "it reaches past the tensor");
    walk_begin(&w, out);
    walk_strides(&w, kept, first * stride[d]);
    if (!c->dry)
        gather_walk(x, out, &w);
    return HETPIPE_OK;
}

static int concatenate(const call *c)
{
    const hetpipe_value *list = hetpipe_argument(c->node, 0, "tensors");
    const tensor *out = &c->results[0];
    int d = out->rank ? dimension(integer_at(c, 1, "dim", 0), out->rank) : -1, i;
    int64_t inner = 1, outer = 1, row, done = 0;
    size_t nbytes = hetpipe_dtype_nbytes(out->dtype);
    uint32_t k;
    if (!list || list->kind != HETPIPE_LIST || d < 0)
        return refuse(c, BAD, "it needs a list of tensors and a dimension");
    for (i = 0; i < out->rank; i++) {
        inner *= i > d ? out->size[i] : 1;
        outer *= i < d ? out->size[i] : 1;
    }
    for (k = 0; k < list->count; k++) {
        const hetpipe_value *item = &list->of.items[k];
        const tensor *x = item->kind == HETPIPE_TENSOR ? &c->tensors[item->of.node] : NULL;
        if (x && x->rank == 1 && x->size[0] == 0)
            continue; /* like torch, ignore an empty vector among tensors of any rank */
        if (!x || x->dtype != out->dtype || x->rank != out->rank)
            return refuse(c, BAD, "tensor %u does not fit the result", (unsigned)k);
        for (i = 0; i < x->rank; i++)
            if (i != d && x->size[i] != out->size[i])
                return refuse(c, BAD, "tensor %u does not fit the result", (unsigned)k);
        if (x->size[d] > out->size[d] - done)
            return refuse(c, BAD, "the tensors together are larger than the result");
        for (row = 0; !c->dry && inner > 0 && x->size[d] > 0 && row < outer; row++)
            memcpy((char *)out->data + (size_t)((row * out->size[d] + done) * inner) * nbytes,
                   (const char *)x->data + (size_t)(row * x->size[d] * inner) * nbytes,
                   (size_t)(x->size[d] * inner) * nbytes);
        done += x->size[d];
    }
    return done == out->size[d] ? HETPIPE_OK
                                : refuse(c, BAD, "the tensors together are smaller than the result");
}

/* sum, mean, amax, amin, any: over some or all dimensions. `real` and `whole` combine two
 * values. */
static int reduce(const call *c)
{
    const tensor *x = tensor_at(c, 0, "self"), *out = &c->results[0];
    const char *name = c->operation->name;
    int64_t dims[HETPIPE_MOST_RANK], to[HETPIPE_MOST_RANK], n, i, terms;
    int count = 0, d, o = 0, keeps = 0, whole, reduced[HETPIPE_MOST_RANK] = {0};
    int extreme = !strncmp(name, "amax", 4) || !strncmp(name, "amin", 4);
    double *reals;
    int64_t *wholes, out_stride[HETPIPE_MOST_RANK];
    walk w;
    if (!x)
        return refuse(c, BAD, "it needs a tensor");
    if (c->operation->operands > 1) {
        count = integers_at(c, 1, "dim", dims, HETPIPE_MOST_RANK);
        keeps = integer_at(c, 2, "keepdim", 0) != 0;
    }
    if (count == -2)
        return refuse(c, BAD, "the dimensions are no list of integers");
    for (i = 0; i < (count > 0 ? count : x->rank); i++) {
        d = count > 0 ? dimension(dims[i], x->rank) : (int)i;
        if (d < 0 || (x->rank && reduced[d]++))
            return refuse(c, BAD, "the dimensions do not fit");
    }
    strides_of(out, out_stride);
    for (d = 0; d < x->rank; d++) {
        to[d] = 0;
        if (reduced[d] && !keeps)
            continue;
        if (o == out->rank || out->size[o] != (reduced[d] ? 1 : x->size[d]))
            return refuse(c, BAD, "the result has another shape");
        to[d] = reduced[d] ? 0 : out_stride[o];
        o++;
    }
    n = elements(out);
    terms = n ? elements(x) / n : 0;
    if (o != out->rank || (extreme && !terms && n))
        return refuse(c, BAD, "the result has another shape");
    whole = is_whole(x) && is_whole(out);
    if (whole && !c->operation->whole)
        return refuse(c, BAD, "only of floating numbers");
    if (c->dry)
        return HETPIPE_OK;
    reals = malloc((size_t)n * sizeof *reals + 1);
    wholes = malloc((size_t)n * sizeof *wholes + 1);
    if (!reals || !wholes) {
        free(reals);
        free(wholes);
        return refuse(c, HETPIPE_FAILED, "out of memory");
    }
    for (i = 0; i < n; i++) {
        reals[i] = !extreme ? 0 : c->operation->real == larger ? -INFINITY : INFINITY;
        wholes[i] = !extreme ? 0 : c->operation->real == larger ? INT64_MIN : INT64_MAX;
    }
    walk_begin(&w, x);
    walk_strides(&w, to, 0);
    for (i = 0; w.left > 0; walk_next(&w), i++) {
        int64_t at = w.at[0];
        if (whole)
            wholes[at] = c->operation->whole(wholes[at], load_whole(x, i), 1);
        else
            reals[at] = c->operation->real(reals[at], load_real(x, i), 1);
    }
    for (i = 0; i < n; i++) {
        if (whole)
            store_whole(out, i, wholes[i]);
        else
            store_real(out, i, strncmp(name, "mean", 4) ? reals[i] : reals[i] / (double)terms);
    }
    free(reals);
    free(wholes);
    return HETPIPE_OK;
}

/* gather(x, dim, index) and scatter(x, dim, index, value): elements at the places of an index. */
static int at_indices(const call *c)
{
    const tensor *x = tensor_at(c, 0, "self"), *index = tensor_at(c, 2, "index");
    const tensor *out = &c->results[0], *inside;
    int scatters = c->operation->operands, d = -1, i;
    int64_t stride[HETPIPE_MOST_RANK], step, room, n, k;
    size_t nbytes = hetpipe_dtype_nbytes(out->dtype);
    tensor value;
    walk w;
    if (x && x->rank)
        d = dimension(integer_at(c, 1, "dim", 0), x->rank);
    if (d < 0 || !index || index->dtype != HETPIPE_INT64 || index->rank != x->rank ||
        x->dtype != out->dtype || !has_form(out, out->dtype, x->rank, scatters ? x->size : index->size))
        return refuse(c, BAD, "the shapes do not fit, or have no dimension");
    for (i = 0; i < x->rank; i++)
        if (i != d && index->size[i] > x->size[i])
            return refuse(c, BAD, "the index is larger than the tensor");
    if (scatters && !scalar_at(c, 3, "value", &room, &value))
        return refuse(c, BAD, "it needs a number");
    if (c->dry)
        return HETPIPE_OK;
    if (scatters && elements(out))
        memcpy(out->data, x->data, (size_t)elements(out) * nbytes);
    inside = scatters ? out : x;
    strides_of(inside, stride);
    step = stride[d];
    stride[d] = 0;
    walk_begin(&w, index);
    walk_strides(&w, stride, 0);
    for (k = 0; w.left > 0; walk_next(&w), k++) {
        n = ((const int64_t *)index->data)[k];
        if (n < 0 || n >= x->size[d])
            return refuse(c, HETPIPE_FAILED, "index %lld is out of range for size %lld",
                          (long long)n, (long long)x->size[d]);
        n = w.at[0] + n * step;
        if (!scatters)
            memcpy((char *)out->data + (size_t)k * nbytes, (const char *)x->data + (size_t)n * nbytes,
                   nbytes);
        else if (is_whole(&value))
            store_whole(out, n, room);
        else
            store_real(out, n, load_real(&value, 0));
    }
    return HETPIPE_OK;
}

#define ONE(name, real, whole) {name ".default", elementwise, real, whole, 1, 1}
#define TWO(name, real, whole)                       \
    {name ".Tensor", elementwise, real, whole, 2, 1},   \
    {name ".Scalar", elementwise, real, whole, 2, 1}

const operation ELEMENT_OPERATIONS[] = {
    TWO("add", add, whole_add), TWO("sub", subtract, whole_subtract),
    TWO("mul", multiply, whole_multiply), TWO("div", divide, NULL),
    TWO("eq", equal, whole_equal), TWO("ne", unequal, whole_unequal),
    TWO("lt", less, whole_less), TWO("le", at_most, whole_at_most),
    TWO("gt", greater, whole_greater), TWO("ge", at_least, whole_at_least),
    TWO("bitwise_and", NULL, whole_and), TWO("bitwise_or", NULL, whole_or),
    TWO("bitwise_xor", NULL, whole_xor),
    {"pow.Tensor_Tensor", elementwise, power, NULL, 2, 1},
    {"pow.Tensor_Scalar", elementwise, power, NULL, 2, 1},
    {"maximum.default", elementwise, larger, whole_larger, 2, 1},
    {"minimum.default", elementwise, smaller, whole_smaller, 2, 1},
    {"logical_and.default", elementwise, both, NULL, 2, 1},
    {"logical_or.default", elementwise, either, NULL, 2, 1},
    {"where.self", elementwise, choose, whole_choose, 3, 1},
    ONE("logical_not", not_true, whole_not), ONE("neg", negate, whole_negate),
    ONE("abs", magnitude, whole_magnitude), ONE("reciprocal", reciprocal, NULL),
    ONE("sqrt", root, NULL), ONE("rsqrt", inverse_root, NULL), ONE("exp", exponential, NULL),
    ONE("expm1", exponential_less_1, NULL), ONE("log", logarithm, NULL),
    ONE("log1p", logarithm_of_1_more, NULL), ONE("tanh", hyperbolic_tangent, NULL),
    ONE("sigmoid", sigmoid, NULL), ONE("erf", error_function, NULL),
    ONE("relu", rectify, whole_rectify), ONE("sin", sine, NULL), ONE("cos", cosine, NULL),
    ONE("floor", round_down, NULL), ONE("ceil", round_up, NULL), ONE("sign", sign, NULL),
    ONE("isinf", is_infinite, NULL), ONE("isnan", is_nan, NULL),
    ONE("_to_copy", same, whole_same),
    {"gelu.default", run_gelu, gelu, NULL, 1, 1},
    {"clamp.default", clamp, NULL, NULL, 0, 1},
    {"full.default", fill, NULL, NULL, 1, 1},
    {"full_like.default", fill, NULL, NULL, 1, 1},
    {"scalar_tensor.default", fill, NULL, NULL, 0, 1},
    {"arange.start_step", fill, NULL, NULL, 0, 1},
    {"view.default", copy, NULL, NULL, 0, 1},
    {"clone.default", copy, NULL, NULL, 0, 1},
    {"alias.default", copy, NULL, NULL, 0, 1},
    {"squeeze.dims", copy, NULL, NULL, 0, 1},
    {"unsqueeze.default", copy, NULL, NULL, 0, 1},
    {"expand.default", expand, NULL, NULL, 0, 1},
    {"permute.default", permute, NULL, NULL, 0, 1},
    {"slice.Tensor", slice, NULL, NULL, 0, 1},
    {"select.int", slice, NULL, NULL, 1, 1},
    {"cat.default", concatenate, NULL, NULL, 0, 1},
    {"sum.dim_IntList", reduce, add, whole_add, 2, 1},
    {"mean.default", reduce, add, NULL, 1, 1},
    {"mean.dim", reduce, add, NULL, 2, 1},
    {"amax.default", reduce, larger, whole_larger, 2, 1},
    {"amin.default", reduce, smaller, whole_smaller, 2, 1},
    {"any.default", reduce, either, whole_or, 1, 1},
    {"any.dim", reduce, either, whole_or, 2, 1},
    {"any.dims", reduce, either, whole_or, 2, 1},
    {"gather.default", at_indices, NULL, NULL, 0, 1},
    {"scatter.value", at_indices, NULL, NULL, 1, 1},
    {NULL, NULL, NULL, NULL, 0, 0},
};
