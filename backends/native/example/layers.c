/* Operators of layers, for float32: matrix products, softmax, convolution, pooling, batch norm. */
#include "operators.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { BAD = HETPIPE_UNSUPPORTED };

static int is_float(const tensor *t, int rank)
{
    return t && t->dtype == HETPIPE_FLOAT32 && t->rank == rank;
}

/* out [m, n] += scale * a [m, k] @ b [k, n] */
static void multiply(float *out, const float *a, const float *b, int64_t m, int64_t k, int64_t n,
                     float scale)
{
    int64_t i, j, l;
    for (i = 0; i < m; i++)
        for (l = 0; l < k; l++) {
            float factor = scale * a[i * k + l];
            for (j = 0; j < n; j++)
                out[i * n + j] += factor * b[l * n + j];
        }
}

/* mm(a, b), bmm(a, b): `operands` is their number of dimensions. */
static int matrix_product(const call *c)
{
    int rank = c->operation->operands, p = rank - 2;
    const tensor *a = tensor_at(c, 0, "self"), *b = tensor_at(c, 1, "mat2"), *out = &c->results[0];
    int64_t i, batch, m, k, n;
    if (!is_float(a, rank) || !is_float(b, rank) || !is_float(out, rank) ||
        a->size[p + 1] != b->size[p] || out->size[p] != a->size[p] ||
        out->size[p + 1] != b->size[p + 1] ||
        (p && (a->size[0] != b->size[0] || a->size[0] != out->size[0])))
        return refuse(c, BAD, "the matrices do not fit, or are not of float32");
    if (c->dry)
        return HETPIPE_OK;
    batch = p ? a->size[0] : 1;
    m = a->size[p];
    k = a->size[p + 1];
    n = b->size[p + 1];
    for (i = 0; i < elements(out); i++)
        ((float *)out->data)[i] = 0;
    for (i = 0; i < batch && elements(out) > 0; i++)
        multiply((float *)out->data + i * m * n, (const float *)a->data + i * m * k,
                 (const float *)b->data + i * k * n, m, k, n, 1);
    return HETPIPE_OK;
}

/* addmm(bias, a, b): beta * bias + alpha * a @ b */
static int add_matrix_product(const call *c)
{
    const tensor *bias = tensor_at(c, 0, "self"), *a = tensor_at(c, 1, "mat1");
    const tensor *b = tensor_at(c, 2, "mat2"), *out = &c->results[0];
    float beta = (float)number_at(c, 3, "beta", 1), alpha = (float)number_at(c, 4, "alpha", 1);
    int64_t i;
    walk w;
    walk_begin(&w, out);
    if (!is_float(a, 2) || !is_float(b, 2) || !is_float(out, 2) || !bias ||
        bias->dtype != HETPIPE_FLOAT32 || a->size[1] != b->size[0] || out->size[0] != a->size[0] ||
        out->size[1] != b->size[1] || !walk_broadcast(&w, bias))
        return refuse(c, BAD, "the matrices do not fit, or are not of float32");
    if (c->dry)
        return HETPIPE_OK;
    for (i = 0; w.left > 0; walk_next(&w), i++)
        ((float *)out->data)[i] = beta == 0 ? 0 : beta * ((const float *)bias->data)[w.at[0]];
    if (elements(out))
        multiply(out->data, a->data, b->data, a->size[0], a->size[1], b->size[1], alpha);
    return HETPIPE_OK;
}

/* _softmax(x, dim, ...), and _log_softmax, whose `operands` is 1. */
static int softmax(const call *c)
{
    const tensor *x = tensor_at(c, 0, "self"), *out = &c->results[0];
    int d = x ? dimension(integer_at(c, 1, "dim", 0), x->rank) : -1, i;
    int64_t n, inner = 1, outer = 1, o, k, j;
    if (d < 0 || !same_form(x, out) || x->dtype != HETPIPE_FLOAT32)
        return refuse(c, BAD, "only of float32, without a cast");
    for (i = 0; i < x->rank; i++) {
        inner *= i > d ? x->size[i] : 1;
        outer *= i < d ? x->size[i] : 1;
    }
    n = x->rank ? x->size[d] : 1;
    if (c->dry || !n)
        return HETPIPE_OK;
    for (o = 0; o < outer; o++)
        for (k = 0; k < inner; k++) {
            const float *from = (const float *)x->data + o * n * inner + k;
            float *to = (float *)out->data + o * n * inner + k;
            double top = -INFINITY, sum = 0;
            for (j = 0; j < n; j++)
                top = from[j * inner] > top ? from[j * inner] : top;
            for (j = 0; j < n; j++)
                sum += exp(from[j * inner] - top);
            for (j = 0; j < n; j++) {
                double shifted = from[j * inner] - top;
                to[j * inner] = (float)(c->operation->operands ? shifted - log(sum)
                                                               : exp(shifted) / sum);
            }
        }
    return HETPIPE_OK;
}

/* The windows of a convolution or a pooling, which slide over planes in two dimensions. */
typedef struct windows {
    int64_t kernel[2], stride[2], padding[2], dilation[2];
} windows;

/* Read a pair of integers, or one integer for both; `standard` if absent or an empty list. */
static int pair_at(const call *c, uint32_t place, const char *name, int64_t standard, int64_t *pair)
{
    int count = integers_at(c, place, name, pair, 2), i;
    if (count == -2)
        return 0;
    if (count == -1 || count == 0)
        pair[0] = pair[1] = standard;
    if (count == 1)
        pair[1] = pair[0];
    for (i = 0; i < 2; i++)
        if (pair[i] < -1 || pair[i] > 1 << 20)
            return 0;
    return 1;
}

/* Return whether the windows over a plane of x have as many places as a plane of y has elements. */
static int slides(const windows *w, const tensor *x, const tensor *y)
{
    int i;
    for (i = 0; i < 2; i++) {
        int64_t span = x->size[2 + i] + 2 * w->padding[i] - w->dilation[i] * (w->kernel[i] - 1) - 1;
        if (w->kernel[i] < 1 || w->stride[i] < 1 || w->padding[i] < 0 || w->dilation[i] < 1 ||
            x->size[2 + i] > 1 << 20 || span < 0 || span / w->stride[i] + 1 != y->size[2 + i])
            return 0;
    }
    return 1;
}

/* Set lo and hi: window element `k` is in the plane at places lo..hi-1 along dimension `i`. */
static void inside(const windows *w, int i, int64_t k, int64_t size, int64_t places, int64_t *lo,
                   int64_t *hi)
{
    int64_t shift = k * w->dilation[i] - w->padding[i], last = size - 1 - shift;
    *lo = shift < 0 ? (-shift + w->stride[i] - 1) / w->stride[i] : 0;
    *hi = last < 0 ? 0 : last / w->stride[i] + 1;
    if (*hi > places)
        *hi = places;
}

enum product { OUTPUT_OF, INPUT_GRADIENT, WEIGHT_GRADIENT };

/* y [n, g*o, i, j] += x [n, g*c, h, w] * f [g*o, c, kh, kw], or one of the two gradients. For a
 * gradient, y holds dy, and the gradient is added to x or to f. */
static void convolve(enum product what, const windows *w, int64_t groups, const tensor *tx,
                     const tensor *tf, const tensor *ty, float *x, float *f, float *y)
{
    int64_t channels = tf->size[1], outputs = tf->size[0] / groups, plane_x, plane_y;
    int64_t n, o, ch, a, b, i, j, lo_i, hi_i, lo_j, hi_j, step = w->stride[1];
    plane_x = tx->size[2] * tx->size[3];
    plane_y = ty->size[2] * ty->size[3];
    for (n = 0; n < tx->size[0]; n++)
        for (o = 0; o < tf->size[0]; o++)
            for (ch = 0; ch < channels; ch++) {
                float *px = x + (n * tx->size[1] + o / outputs * channels + ch) * plane_x;
                float *py = y + (n * ty->size[1] + o) * plane_y;
                for (a = 0; a < w->kernel[0]; a++)
                    for (b = 0; b < w->kernel[1]; b++) {
                        float *pf = f + ((o * channels + ch) * w->kernel[0] + a) * w->kernel[1] + b;
                        float factor = *pf;
                        double sum = 0;
                        inside(w, 0, a, tx->size[2], ty->size[2], &lo_i, &hi_i);
                        inside(w, 1, b, tx->size[3], ty->size[3], &lo_j, &hi_j);
                        for (i = lo_i; i < hi_i && lo_j < hi_j; i++) {
                            int64_t row = i * w->stride[0] + a * w->dilation[0] - w->padding[0];
                            float *rx = px + row * tx->size[3] +
                                        (lo_j * step + b * w->dilation[1] - w->padding[1]);
                            float *ry = py + i * ty->size[3] + lo_j;
                            int64_t count = hi_j - lo_j;
                            if (what == OUTPUT_OF)
                                for (j = 0; j < count; j++)
                                    ry[j] += factor * rx[j * step];
                            else if (what == INPUT_GRADIENT)
                                for (j = 0; j < count; j++)
                                    rx[j * step] += factor * ry[j];
                            else
                                for (j = 0; j < count; j++)
                                    sum += (double)rx[j * step] * ry[j];
                        }
                        if (what == WEIGHT_GRADIENT)
                            *pf += (float)sum;
                    }
            }
}

/* Read the geometry of a convolution whose stride is argument `place`; 0 if it is unsupported. */
static int geometry(const call *c, uint32_t place, const tensor *x, const tensor *f,
                    const tensor *y, windows *w, int64_t *groups)
{
    int i;
    *groups = integer_at(c, place + 5, "groups", 1);
    if (!is_float(x, 4) || !is_float(f, 4) || !is_float(y, 4) ||
        !pair_at(c, place, "stride", 1, w->stride) ||
        !pair_at(c, place + 1, "padding", 0, w->padding) ||
        !pair_at(c, place + 2, "dilation", 1, w->dilation) ||
        integer_at(c, place + 3, "transposed", 0))
        return 0;
    for (i = 0; i < 2; i++) {
        w->kernel[i] = f->size[2 + i];
        if (w->kernel[i] > 1 << 20)
            return 0;
    }
    return *groups >= 1 && slides(w, x, y) && x->size[0] == y->size[0] && f->size[0] > 0 &&
           f->size[0] == y->size[1] && f->size[0] % *groups == 0 && x->size[1] % *groups == 0 &&
           x->size[1] / *groups == f->size[1];
}

static int convolution(const call *c)
{
    const tensor *x = tensor_at(c, 0, "input"), *f = tensor_at(c, 1, "weight");
    const tensor *bias = tensor_at(c, 2, "bias"), *y = &c->results[0];
    int64_t groups, i, plane;
    windows w;
    if (!geometry(c, 3, x, f, y, &w, &groups) || (bias && !has_form(bias, HETPIPE_FLOAT32, 1, f->size)))
        return refuse(c, BAD, "only in two dimensions, not transposed, with shapes that fit");
    plane = y->size[2] * y->size[3];
    if (c->dry || !elements(y))
        return HETPIPE_OK;
    for (i = 0; i < elements(y); i++)
        ((float *)y->data)[i] = bias ? ((const float *)bias->data)[i / plane % f->size[0]] : 0;
    convolve(OUTPUT_OF, &w, groups, x, f, y, x->data, f->data, y->data);
    return HETPIPE_OK;
}

/* Gradients of x, weight and bias; results that are not requested have no dtype. */
static int convolution_backward(const call *c)
{
    const tensor *dy = tensor_at(c, 0, "grad_output"), *x = tensor_at(c, 1, "input");
    const tensor *f = tensor_at(c, 2, "weight"), *out = c->results;
    int64_t groups, i, n, plane;
    double *sums;
    windows w;
    if (!geometry(c, 4, x, f, dy, &w, &groups) ||
        (out[0].dtype && !same_form(&out[0], x)) || (out[1].dtype && !same_form(&out[1], f)) ||
        (out[2].dtype && !has_form(&out[2], HETPIPE_FLOAT32, 1, f->size)))
        return refuse(c, BAD, "only in two dimensions, not transposed, with shapes that fit");
    if (c->dry)
        return HETPIPE_OK;
    for (i = 0; i < 2; i++)
        for (n = 0; out[i].dtype && n < elements(&out[i]); n++)
            ((float *)out[i].data)[n] = 0;
    if (out[0].dtype && elements(dy))
        convolve(INPUT_GRADIENT, &w, groups, x, f, dy, out[0].data, f->data, dy->data);
    if (out[1].dtype && elements(dy))
        convolve(WEIGHT_GRADIENT, &w, groups, x, f, dy, x->data, out[1].data, dy->data);
    if (!out[2].dtype)
        return HETPIPE_OK;
    sums = calloc((size_t)f->size[0], sizeof *sums);
    if (!sums)
        return refuse(c, HETPIPE_FAILED, "out of memory");
    plane = dy->size[2] * dy->size[3];
    for (i = 0; i < elements(dy); i++)
        sums[i / plane % f->size[0]] += ((const float *)dy->data)[i];
    for (i = 0; i < f->size[0]; i++)
        ((float *)out[2].data)[i] = (float)sums[i];
    free(sums);
    return HETPIPE_OK;
}

/* Read the windows of a pooling whose kernel is argument `place`, from planes of x to planes of y;
 * 0 if they do not fit or are unsupported. */
static int pooling(const call *c, uint32_t place, int dilates, const tensor *x, const tensor *y,
                   windows *w)
{
    uint32_t ceil_place = place + 3 + (dilates ? 1u : 0u);
    int64_t given[2];
    w->dilation[0] = w->dilation[1] = 1;
    if (!is_float(x, 4) || !is_float(y, 4) || x->size[0] != y->size[0] || x->size[1] != y->size[1] ||
        !pair_at(c, place, "kernel_size", 1, w->kernel) || w->kernel[0] > 64 || w->kernel[1] > 64 ||
        !pair_at(c, place + 1, "stride", -1, given) ||
        !pair_at(c, place + 2, "padding", 0, w->padding) ||
        (dilates && !pair_at(c, place + 3, "dilation", 1, w->dilation)) ||
        integer_at(c, ceil_place, "ceil_mode", 0))
        return 0;
    w->stride[0] = given[0] == -1 ? w->kernel[0] : given[0]; /* no stride: windows side by side */
    w->stride[1] = given[1] == -1 ? w->kernel[1] : given[1];
    /* With padding up to half a window, every window without dilation has an element inside. */
    return slides(w, x, y) && 2 * w->padding[0] <= w->kernel[0] && 2 * w->padding[1] <= w->kernel[1];
}

/* Return the place in the plane of element (a, b) of the window at (i, j), or -1 outside. */
static int64_t place_in(const windows *w, const tensor *x, int64_t i, int64_t j, int64_t a, int64_t b)
{
    int64_t row = i * w->stride[0] + a * w->dilation[0] - w->padding[0];
    int64_t column = j * w->stride[1] + b * w->dilation[1] - w->padding[1];
    if (row < 0 || row >= x->size[2] || column < 0 || column >= x->size[3])
        return -1;
    return row * x->size[3] + column;
}

static int max_pool(const call *c)
{
    const tensor *x = tensor_at(c, 0, "self"), *y = &c->results[0], *places;
    int64_t p, i, j, a, b, at, plane_x, n = 0;
    windows w;
    if (!pooling(c, 1, 1, x, y, &w) ||
        !has_form(&c->results[1], HETPIPE_INT64, 4, y->size))
        return refuse(c, BAD, "only in two dimensions, without ceil_mode, with shapes that fit");
    places = &c->results[1];
    plane_x = x->size[2] * x->size[3];
    for (p = 0; !c->dry && p < y->size[0] * y->size[1]; p++)
        for (i = 0; i < y->size[2]; i++)
            for (j = 0; j < y->size[3]; j++, n++) {
                const float *from = (const float *)x->data + p * plane_x;
                int64_t best = -1;
                for (a = 0; a < w.kernel[0]; a++)
                    for (b = 0; b < w.kernel[1]; b++) {
                        at = place_in(&w, x, i, j, a, b);
                        if (at >= 0 && (best < 0 || from[at] > from[best] || isnan(from[at])))
                            best = at;
                    }
                ((float *)y->data)[n] = best < 0 ? -INFINITY : from[best];
                ((int64_t *)places->data)[n] = best < 0 ? 0 : best;
            }
    return HETPIPE_OK;
}

static int max_pool_backward(const call *c)
{
    const tensor *dy = tensor_at(c, 0, "grad_output"), *x = tensor_at(c, 1, "self");
    const tensor *places = tensor_at(c, 7, "indices"), *dx = &c->results[0];
    int64_t n, plane_x, plane_y;
    windows w;
    if (!pooling(c, 2, 1, x, dy, &w) || !same_form(x, dx) || !places ||
        !has_form(places, HETPIPE_INT64, 4, dy->size))
        return refuse(c, BAD, "only in two dimensions, without ceil_mode, with shapes that fit");
    if (c->dry || !elements(dx))
        return HETPIPE_OK;
    plane_x = x->size[2] * x->size[3];
    plane_y = dy->size[2] * dy->size[3];
    for (n = 0; n < elements(dx); n++)
        ((float *)dx->data)[n] = 0;
    for (n = 0; n < elements(dy); n++) {
        int64_t at = ((const int64_t *)places->data)[n];
        if (at < 0 || at >= plane_x)
            return refuse(c, HETPIPE_FAILED, "place %lld is out of range for a plane of %lld",
                          (long long)at, (long long)plane_x);
        ((float *)dx->data)[n / plane_y * plane_x + at] += ((const float *)dy->data)[n];
    }
    return HETPIPE_OK;
}

/* avg_pool2d(x, ...), and avg_pool2d_backward(dy, x, ...), whose `operands` is 1. */
static int avg_pool(const call *c)
{
    int back = c->operation->operands;
    const tensor *y = back ? tensor_at(c, 0, "grad_output") : &c->results[0];
    const tensor *x = tensor_at(c, back ? 1 : 0, "self"), *out = &c->results[0];
    uint32_t place = back ? 2 : 1;
    int64_t p, i, j, a, b, at, plane_x, n = 0, divisor;
    int pads = integer_at(c, place + 4, "count_include_pad", 1) != 0;
    windows w;
    divisor = integer_at(c, place + 5, "divisor_override", 0);
    if (!pooling(c, place, 0, x, y, &w) || (back && !same_form(x, out)))
        return refuse(c, BAD, "only in two dimensions, without ceil_mode, with shapes that fit");
    plane_x = x->size[2] * x->size[3];
    for (i = 0; back && !c->dry && i < elements(out); i++)
        ((float *)out->data)[i] = 0;
    for (p = 0; !c->dry && p < y->size[0] * y->size[1]; p++)
        for (i = 0; i < y->size[2]; i++)
            for (j = 0; j < y->size[3]; j++, n++) {
                int64_t terms = 0;
                double sum = 0;
                for (a = 0; a < w.kernel[0]; a++)
                    for (b = 0; b < w.kernel[1]; b++)
                        if ((at = place_in(&w, x, i, j, a, b)) >= 0) {
                            terms++;
                            if (!back)
                                sum += ((const float *)x->data)[p * plane_x + at];
                        }
                terms = divisor ? divisor : pads ? w.kernel[0] * w.kernel[1] : terms;
                if (!back) {
                    ((float *)y->data)[n] = (float)(sum / (double)terms);
                    continue;
                }
                for (a = 0; a < w.kernel[0]; a++)
                    for (b = 0; b < w.kernel[1]; b++)
                        if ((at = place_in(&w, x, i, j, a, b)) >= 0)
                            ((float *)out->data)[p * plane_x + at] +=
                                ((const float *)y->data)[n] / (float)terms;
            }
    return HETPIPE_OK;
}

/* _native_batch_norm_legit_functional: normalised x [n, c, ...], mean and 1 / deviation of each
 * channel, and new running statistics. */
static int batch_norm(const call *c)
{
    const tensor *x = tensor_at(c, 0, "input"), *weight = tensor_at(c, 1, "weight");
    const tensor *bias = tensor_at(c, 2, "bias"), *mean = tensor_at(c, 3, "running_mean");
    const tensor *variance = tensor_at(c, 4, "running_var"), *out = c->results;
    double momentum = number_at(c, 6, "momentum", 0.1), eps = number_at(c, 7, "eps", 1e-5);
    int64_t channels, inner = 1, outer, ch, o, k, terms;
    const float *from;
    int i, fits;
    if (!x || x->rank < 2 || x->dtype != HETPIPE_FLOAT32)
        return refuse(c, BAD, "only of float32, with a dimension for channels");
    channels = x->size[1];
    outer = x->size[0];
    fits = same_form(x, &out[0]) && mean && variance && integer_at(c, 5, "training", 0) == 1;
    for (i = 1; i < 5; i++)
        fits = fits && has_form(&out[i], HETPIPE_FLOAT32, 1, &channels);
    fits = fits && has_form(mean, HETPIPE_FLOAT32, 1, &channels) &&
           has_form(variance, HETPIPE_FLOAT32, 1, &channels) &&
           (!weight || has_form(weight, HETPIPE_FLOAT32, 1, &channels)) &&
           (!bias || has_form(bias, HETPIPE_FLOAT32, 1, &channels));
    for (i = 2; i < x->rank; i++)
        inner *= x->size[i];
    terms = outer * inner;
    if (!fits || (terms < 2 && channels))
        return refuse(c, BAD, "only in training, with statistics, of more than one value");
    for (ch = 0; !c->dry && ch < channels; ch++) {
        double sum = 0, squares = 0, centre, scale, shift;
        from = (const float *)x->data + ch * inner;
        for (o = 0; o < outer; o++)
            for (k = 0; k < inner; k++)
                sum += from[o * channels * inner + k];
        centre = sum / (double)terms;
        for (o = 0; o < outer; o++)
            for (k = 0; k < inner; k++) {
                double difference = from[o * channels * inner + k] - centre;
                squares += difference * difference;
            }
        scale = 1 / sqrt(squares / (double)terms + eps);
        ((float *)out[1].data)[ch] = (float)centre;
        ((float *)out[2].data)[ch] = (float)scale;
        ((float *)out[3].data)[ch] =
            (float)(momentum * centre + (1 - momentum) * ((const float *)mean->data)[ch]);
        ((float *)out[4].data)[ch] = (float)(momentum * squares / (double)(terms - 1) +
                                             (1 - momentum) * ((const float *)variance->data)[ch]);
        scale *= weight ? ((const float *)weight->data)[ch] : 1;
        shift = bias ? ((const float *)bias->data)[ch] : 0;
        for (o = 0; o < outer; o++)
            for (k = 0; k < inner; k++) {
                int64_t at = (o * channels + ch) * inner + k;
                ((float *)out[0].data)[at] =
                    (float)((((const float *)x->data)[at] - centre) * scale + shift);
            }
    }
    return HETPIPE_OK;
}

const operation LAYER_OPERATIONS[] = {
    {"mm.default", matrix_product, NULL, NULL, 2, 1},
    {"bmm.default", matrix_product, NULL, NULL, 3, 1},
    {"addmm.default", add_matrix_product, NULL, NULL, 0, 1},
    {"_softmax.default", softmax, NULL, NULL, 0, 1},
    {"_log_softmax.default", softmax, NULL, NULL, 1, 1},
    {"convolution.default", convolution, NULL, NULL, 0, 1},
    {"convolution_backward.default", convolution_backward, NULL, NULL, 0, 3},
    {"max_pool2d_with_indices.default", max_pool, NULL, NULL, 0, 2},
    {"max_pool2d_with_indices_backward.default", max_pool_backward, NULL, NULL, 0, 1},
    {"avg_pool2d.default", avg_pool, NULL, NULL, 0, 1},
    {"avg_pool2d_backward.default", avg_pool, NULL, NULL, 1, 1},
    {"_native_batch_norm_legit_functional.default", batch_norm, NULL, NULL, 0, 5},
    {NULL, NULL, NULL, NULL, 0, 0},
};
