/* Arguments, elements and walks: see operators.h. */
#include "operators.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

const operation *find_operation(const char *target)
{
    const operation *tables[2], *row;
    int i;
    tables[0] = ELEMENT_OPERATIONS;
    tables[1] = LAYER_OPERATIONS;
    if (strncmp(target, "aten.", 5))
        return NULL;
    for (i = 0; i < 2; i++)
        for (row = tables[i]; row->name; row++)
            if (!strcmp(row->name, target + 5))
                return row;
    return NULL;
}

int refuse(const call *c, int code, const char *format, ...)
{
    char reason[512];
    va_list values;
    va_start(values, format);
    vsnprintf(reason, sizeof reason, format, values);
    va_end(values);
    if (c->dry && !c->node->layer) /* in `supports`, whose caller names the operator */
        snprintf(c->error->text, sizeof c->error->text, "%s", reason);
    else
        snprintf(c->error->text, sizeof c->error->text, "%.100s of layer %.200s: %s",
                 c->node->target, c->node->layer ? c->node->layer : "?", reason);
    return code;
}

const tensor *tensor_at(const call *c, uint32_t place, const char *name)
{
    const hetpipe_value *value = hetpipe_argument(c->node, place, name);
    return value && value->kind == HETPIPE_TENSOR ? &c->tensors[value->of.node] : NULL;
}

static double number_of(const hetpipe_value *value, double standard)
{
    if (value && value->kind == HETPIPE_NUMBER)
        return value->of.number;
    if (value && (value->kind == HETPIPE_INTEGER || value->kind == HETPIPE_A_BOOL))
        return (double)value->of.integer;
    return standard;
}

double number_at(const call *c, uint32_t place, const char *name, double standard)
{
    return number_of(hetpipe_argument(c->node, place, name), standard);
}

int64_t integer_at(const call *c, uint32_t place, const char *name, int64_t standard)
{
    const hetpipe_value *value = hetpipe_argument(c->node, place, name);
    if (value && (value->kind == HETPIPE_INTEGER || value->kind == HETPIPE_A_BOOL))
        return value->of.integer;
    return standard;
}

int integers_at(const call *c, uint32_t place, const char *name, int64_t *out, int most)
{
    const hetpipe_value *value = hetpipe_argument(c->node, place, name);
    uint32_t i;
    if (!value || value->kind == HETPIPE_NONE)
        return -1;
    if (value->kind == HETPIPE_INTEGER) {
        out[0] = value->of.integer;
        return 1;
    }
    if (value->kind != HETPIPE_LIST || value->count > (uint32_t)most)
        return -2;
    for (i = 0; i < value->count; i++) {
        const hetpipe_value *item = &value->of.items[i];
        if (item->kind != HETPIPE_INTEGER && item->kind != HETPIPE_A_BOOL)
            return -2;
        out[i] = item->of.integer;
    }
    return (int)value->count;
}

int dimension(int64_t dim, int rank)
{
    if (rank == 0)
        rank = 1; /* torch lets a tensor without dimensions have dimension 0 */
    if (dim < -rank || dim >= rank)
        return -1;
    return (int)(dim < 0 ? dim + rank : dim);
}

int64_t elements(const tensor *t)
{
    int64_t count = 1;
    int i;
    for (i = 0; i < t->rank; i++)
        count *= t->size[i];
    return count;
}

int has_form(const tensor *t, uint8_t dtype, int rank, const int64_t *size)
{
    return t && t->dtype == dtype && t->rank == rank &&
           (rank == 0 || !memcmp(t->size, size, (size_t)rank * sizeof *size));
}

int same_form(const tensor *a, const tensor *b)
{
    return a && b && has_form(a, b->dtype, b->rank, b->size);
}

int is_whole(const tensor *t)
{
    return t->dtype != HETPIPE_FLOAT32 && t->dtype != HETPIPE_FLOAT64;
}

void strides_of(const tensor *t, int64_t *stride)
{
    int64_t step = 1;
    int i;
    for (i = t->rank - 1; i >= 0; i--) {
        stride[i] = step;
        step *= t->size[i];
    }
}

double load_real(const tensor *t, int64_t at)
{
    if (t->dtype == HETPIPE_FLOAT32)
        return ((const float *)t->data)[at];
    if (t->dtype == HETPIPE_FLOAT64)
        return ((const double *)t->data)[at];
    return (double)load_whole(t, at);
}

static int64_t whole_of(double value)
{
    return value > -9.2e18 && value < 9.2e18 ? (int64_t)value : INT64_MIN; /* NaN, too */
}

int64_t load_whole(const tensor *t, int64_t at)
{
    switch (t->dtype) {
    case HETPIPE_INT64:
        return ((const int64_t *)t->data)[at];
    case HETPIPE_INT32:
        return ((const int32_t *)t->data)[at];
    case HETPIPE_BOOL:
        return ((const uint8_t *)t->data)[at];
    default:
        return whole_of(load_real(t, at));
    }
}

void store_real(const tensor *t, int64_t at, double value)
{
    if (t->dtype == HETPIPE_FLOAT32)
        ((float *)t->data)[at] = (float)value;
    else if (t->dtype == HETPIPE_BOOL)
        ((uint8_t *)t->data)[at] = value != 0;
    else
        store_whole(t, at, whole_of(value));
}

void store_whole(const tensor *t, int64_t at, int64_t value)
{
    switch (t->dtype) {
    case HETPIPE_INT64:
        ((int64_t *)t->data)[at] = value;
        break;
    case HETPIPE_INT32:
        ((int32_t *)t->data)[at] = (int32_t)(uint32_t)(uint64_t)value;
        break;
    case HETPIPE_BOOL:
        ((uint8_t *)t->data)[at] = value != 0;
        break;
    default:
        store_real(t, at, (double)value);
    }
}

void walk_begin(walk *w, const tensor *shape)
{
    int i;
    memset(w, 0, sizeof *w);
    w->rank = shape->rank;
    for (i = 0; i < w->rank; i++)
        w->size[i] = shape->size[i];
    w->left = elements(shape);
}

int walk_broadcast(walk *w, const tensor *t)
{
    int64_t stride[HETPIPE_MOST_RANK], wide[HETPIPE_MOST_RANK];
    int i, shift = w->rank - t->rank;
    if (shift < 0)
        return 0;
    memset(wide, 0, sizeof wide);
    strides_of(t, stride);
    for (i = 0; i < t->rank; i++) {
        if (t->size[i] == w->size[shift + i])
            wide[shift + i] = stride[i];
        else if (t->size[i] != 1)
            return 0;
    }
    walk_strides(w, wide, 0);
    return 1;
}

void walk_strides(walk *w, const int64_t *stride, int64_t first)
{
    if (w->rank)
        memcpy(w->stride[w->operands], stride, (size_t)w->rank * sizeof *stride);
    w->at[w->operands++] = first;
}

void walk_next(walk *w)
{
    int dim, i;
    w->left--;
    for (dim = w->rank - 1; dim >= 0; dim--) {
        if (++w->index[dim] < w->size[dim]) {
            for (i = 0; i < w->operands; i++)
                w->at[i] += w->stride[i][dim];
            return;
        }
        w->index[dim] = 0; /* back to the start of this dimension, then next in the one before */
        for (i = 0; i < w->operands; i++)
            w->at[i] -= w->stride[i][dim] * (w->size[dim] - 1);
    }
}
