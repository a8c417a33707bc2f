// Softmax, log-softmax and the negative log likelihood on CPUs.
//
//   x, y, dy, dx    [outer][D][inner]; softmax is over D
//   target          int64 [outer][inner], classes; weight [D]
// `*_rows` are for inner = 1: a work-item takes one row or several in turn. `*_columns` take 16 neighbours of inner at a time.
// Option PAST_CACHES: y of `softmax_rows` is too large for the caches; its rows are whole lines of at most MOST_CLASSES floats.

#define MOST_CLASSES 4096

// Like load_upto, but with `fill` instead of zeros.
inline float16 load_or(__global const float* p, const int count, const float fill) {
  if (count >= LANES) return vload16(0, p);
  float lane[LANES];
  for (int i = 0; i < LANES; i++) lane[i] = i < count ? p[i] : fill;
  return vload16(0, lane);
}

// exp(x) for x <= 0 with an error of at most 3 ULP, in half the instructions of exact_exp; 0 below -87.7.
inline float16 exp_below_zero(const float16 x) {
  const float16 y = select(x, (float16)(-88.0f), x < (float16)(-88.0f));
  // The constant is 1.5 * 2^23 plus the exponent's bias: the sum's low bits are the exponent of 2^n, or of 0 for n = -127.
  const float16 shifted = fma(y, (float16)(1.44269502f), (float16)(12583039.0f));
  const float16 r = fma(shifted - (float16)(12583039.0f), (float16)(-0.693147182f), y);
  float16 p = fma((float16)(8.29027221e-3f), r, (float16)(4.18981612e-2f));
  p = fma(p, r, (float16)(0.166676387f));
  p = fma(p, r, (float16)(0.499991477f));
  p = fma(p, r, (float16)(0.999999702f));
  p = fma(p, r, (float16)(1.0f));
  return p * as_float16(as_uint16(shifted) << 23);
}

// The larger of a and b, or a if one is NaN. fmax takes longer, since it checks for NaN.
#define LARGER(a, b) select(a, b, a < b)

// The largest element of a row, or -infinity if it is empty. Four maxima at once, since a maximum takes longer than a load.
inline float peak_of(__global const float* x, const int count) {
  float16 a = (float16)(-INFINITY), b = a, c = a, d = a;
  int i = 0;
  for (; i + 4 * LANES <= count; i += 4 * LANES) {
    a = LARGER(a, vload16(0, x + i));
    b = LARGER(b, vload16(1, x + i));
    c = LARGER(c, vload16(2, x + i));
    d = LARGER(d, vload16(3, x + i));
  }
  for (; i < count; i += LANES) a = LARGER(a, load_or(x + i, count - i, -INFINITY));
  return max_lanes(fmax(fmax(a, b), fmax(c, d)));
}

inline void log_softmax_row(__global const float* x, const int classes, __global float* y) {
  const float peak = peak_of(x, classes);
  const int whole = classes / LANES * LANES;
  float16 sums = exp_below_zero(load_or(x + whole, classes - whole, -INFINITY) - peak);
  for (int i = 0; i < whole; i += LANES) sums += exp_below_zero(vload16(0, x + i) - peak);
  const float log_sum = log(sum_lanes(sums));
  for (int i = 0; i < classes; i += LANES)
    store_upto(load_upto(x + i, classes - i) - peak - log_sum, y + i, classes - i);
}

// Softmax of one row. Returns the largest element of the row at `next`, whose loads run during the exponentials.
inline float softmax_row(__global const float* x, const int classes, const float peak, __global const float* next,
                         __global float* y) {
#ifdef PAST_CACHES
  float powers[MOST_CLASSES];
#define AT_ONCE(value, i) vstore16(value, 0, powers + (i))
#else
  __global float* powers = y;
#define AT_ONCE(value, i) vstore16_at_once(value, powers + (i))
#endif
  const int whole = classes / LANES * LANES, rest = classes - whole;
  const float16 last = exp_below_zero(load_or(x + whole, rest, -INFINITY) - peak);
  float16 sums = last, more_sums = (float16)(0.0f);
  float16 peaks = load_or(next + whole, rest, -INFINITY), more_peaks = (float16)(-INFINITY);
  int i = 0;
  for (; i + 2 * LANES <= whole; i += 2 * LANES) {
    const float16 power = exp_below_zero(vload16(0, x + i) - peak), another = exp_below_zero(vload16(1, x + i) - peak);
    const float16 coming = vload16(0, next + i), more_coming = vload16(1, next + i);
    peaks = LARGER(peaks, coming);
    more_peaks = LARGER(more_peaks, more_coming);
    AT_ONCE(power, i);
    AT_ONCE(another, i + LANES);
    sums += power;
    more_sums += another;
  }
  for (; i < whole; i += LANES) {
    const float16 power = exp_below_zero(vload16(0, x + i) - peak), coming = vload16(0, next + i);
    peaks = LARGER(peaks, coming);
    AT_ONCE(power, i);
    sums += power;
  }
  const float inverse = 1.0f / sum_lanes(sums + more_sums);
#ifdef PAST_CACHES
  for (int k = 0; k < whole; k += LANES) STORE_PAST_CACHES(vload16(0, powers + k) * inverse, y + k);
#else
  for (int k = 0; k < whole; k += LANES) vstore16_at_once(vload16(0, powers + k) * inverse, y + k);
#endif
  if (rest > 0) store_upto(last * inverse, y + whole, rest);
  return max_lanes(LARGER(peaks, more_peaks));
}

// Global size: parts of `each` of the `outer` rows
WORK_ITEM __kernel void softmax_rows(__global const float* restrict x, __global float* restrict y, const int outer,
                                     const int each, const int classes, const int logarithm) {
  const int first = (int)get_global_id(0) * each, last = min(outer, first + each);
  if (logarithm) {
    for (int row = first; row < last; row++) log_softmax_row(x + row * classes, classes, y + row * classes);
    return;
  }
  float peak = peak_of(x + first * classes, classes);
  for (int row = first; row < last; row++) {
    __global const float* from = x + row * classes;
    __global const float* next = row + 1 < last ? from + classes : from;
    peak = softmax_row(from, classes, peak, next, y + row * classes);
  }
}

// Global size: blocks of 16 of inner, outer
WORK_ITEM __kernel void softmax_columns(__global const float* restrict x, __global float* restrict y,
                                        const int classes, const int inner, const int logarithm) {
  const int i = get_global_id(0) * LANES, count = inner - i;
  x += (int)get_global_id(1) * classes * inner + i;
  y += (int)get_global_id(1) * classes * inner + i;
  float16 peak = (float16)(-INFINITY), sum = (float16)(0.0f);
  for (int c = 0; c < classes; c++) peak = fmax(peak, load_upto(x + c * inner, count));
  for (int c = 0; c < classes; c++) sum += exp_below_zero(load_upto(x + c * inner, count) - peak);
  const float16 log_sum = log(sum);
  for (int c = 0; c < classes; c++) {
    const float16 v = load_upto(x + c * inner, count) - peak;
    store_upto(logarithm ? v - log_sum : exp_below_zero(v) / sum, y + c * inner, count);
  }
}

// With `logarithm`, dx = dy - exp(y) sum(dy); else dx = y (dy - sum(dy y)). dx may be dy or y. Global size: outer
WORK_ITEM __kernel void softmax_backward_rows(__global const float* dy, __global const float* y,
                                              __global float* dx, const int classes, const int logarithm) {
  const int at = (int)get_global_id(0) * classes;
  float16 sums = (float16)(0.0f);
  for (int i = 0; i < classes; i += LANES) {
    const float16 g = load_upto(dy + at + i, classes - i);
    sums += logarithm ? g : g * load_upto(y + at + i, classes - i);
  }
  const float sum = sum_lanes(sums);
  for (int i = 0; i < classes; i += LANES) {
    const float16 g = load_upto(dy + at + i, classes - i), v = load_upto(y + at + i, classes - i);
    store_upto(logarithm ? g - exact_exp(v) * sum : v * (g - sum), dx + at + i, classes - i);
  }
}

// Global size: blocks of 16 of inner, outer
WORK_ITEM __kernel void softmax_backward_columns(__global const float* dy, __global const float* y,
                                                 __global float* dx, const int classes, const int inner,
                                                 const int logarithm) {
  const int i = get_global_id(0) * LANES, count = inner - i, at = (int)get_global_id(1) * classes * inner + i;
  float16 sum = (float16)(0.0f);
  for (int c = 0; c < classes; c++) {
    const float16 g = load_upto(dy + at + c * inner, count);
    sum += logarithm ? g : g * load_upto(y + at + c * inner, count);
  }
  for (int c = 0; c < classes; c++) {
    const float16 g = load_upto(dy + at + c * inner, count), v = load_upto(y + at + c * inner, count);
    store_upto(logarithm ? g - exact_exp(v) * sum : v * (g - sum), dx + at + c * inner, count);
  }
}

#define NONE 0
#define MEAN 1
#define BLOCK 256

inline float class_weight(__global const float* weight, const int has_weight, const long class_) {
  return has_weight ? weight[class_] : 1.0f;
}

// The loss, or a loss per sample if reduction is NONE; a class that does not exist gives NaN. Sums are added by blocks,
// for small rounding errors. Global size: 1
WORK_ITEM __kernel void nll_forward(__global const float* restrict x, __global const long* restrict target,
                                    __global const float* weight, const int has_weight, __global float* loss,
                                    __global float* total_weight, const int outer, const int classes,
                                    const int inner, const int reduction, const int ignore) {
  float total = 0.0f, weights = 0.0f;
  for (int first = 0; first < outer * inner; first += BLOCK) {
    float part = 0.0f, part_weights = 0.0f;
    for (int s = first; s < min(first + BLOCK, outer * inner); s++) {
      const long class_ = target[s];
      float value = 0.0f;
      if (class_ != ignore) {
        const bool exists = class_ >= 0 && class_ < classes;
        const float w = exists ? class_weight(weight, has_weight, class_) : NAN;
        value = exists ? -w * x[(s / inner * classes + (int)class_) * inner + s % inner] : NAN;
        part_weights += w;
      }
      part += value;
      if (reduction == NONE) loss[s] = value;
    }
    total += part;
    weights += part_weights;
  }
  if (reduction != NONE) loss[0] = reduction == MEAN ? total / weights : total;
  total_weight[0] = reduction == NONE ? 0.0f : weights;
}

// Global size: outer
WORK_ITEM __kernel void nll_backward(__global const float* restrict dloss, __global const long* restrict target,
                                     __global const float* weight, const int has_weight,
                                     __global const float* total_weight, __global float* restrict dx,
                                     const int classes, const int inner, const int reduction, const int ignore) {
  const int n = get_global_id(0), size = classes * inner;
  dx += n * size;
  for (int i = 0; i < size; i += LANES) store_upto((float16)(0.0f), dx + i, size - i);
  for (int p = 0; p < inner; p++) {
    const long class_ = target[n * inner + p];
    if (class_ == ignore || class_ < 0 || class_ >= classes) continue;
    float g = dloss[reduction == NONE ? n * inner + p : 0];
    if (reduction == MEAN) g /= total_weight[0];
    dx[(int)class_ * inner + p] = -g * class_weight(weight, has_weight, class_);
  }
}
