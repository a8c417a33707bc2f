// Softmax, log-softmax and the negative log likelihood on CPUs.
//
//   x, y, dy, dx    [outer][D][inner]; softmax is over D
//   target          int64 [outer][inner], classes; weight [D]
// `*_rows` serve inner = 1, one work-item per row; `*_columns` serve 16 neighbours of inner at a time.

// As load_upto, with `fill` where there is nothing.
inline float16 load_or(__global const float* p, const int count, const float fill) {
  if (count >= LANES) return vload16(0, p);
  float lane[LANES];
  for (int i = 0; i < LANES; i++) lane[i] = i < count ? p[i] : fill;
  return vload16(0, lane);
}

// The largest element of a row: four maxima at once, since each takes longer than a load. -infinity if there is none.
inline float peak_of(__global const float* x, const int count) {
  float16 a = (float16)(-INFINITY), b = a, c = a, d = a;
  int i = 0;
  for (; i + 4 * LANES <= count; i += 4 * LANES) {
    a = fmax(a, vload16(0, x + i));
    b = fmax(b, vload16(1, x + i));
    c = fmax(c, vload16(2, x + i));
    d = fmax(d, vload16(3, x + i));
  }
  for (; i < count; i += LANES) a = fmax(a, load_or(x + i, count - i, -INFINITY));
  return max_lanes(fmax(fmax(a, b), fmax(c, d)));
}

// Global size: outer
WORK_ITEM __kernel void softmax_rows(__global const float* restrict x, __global float* restrict y, const int classes,
                                     const int logarithm) {
  x += (int)get_global_id(0) * classes;
  y += (int)get_global_id(0) * classes;
  const float peak = peak_of(x, classes);
  float16 sums = (float16)(0.0f);
  for (int i = 0; i < classes; i += LANES) {
    const float16 power = exact_exp(load_or(x + i, classes - i, -INFINITY) - peak);
    if (!logarithm) store_upto(power, y + i, classes - i);
    sums += power;
  }
  const float sum = sum_lanes(sums), log_sum = log(sum), inverse = 1.0f / sum;
  for (int i = 0; i < classes; i += LANES) {
    const int count = classes - i;
    store_upto(logarithm ? load_upto(x + i, count) - peak - log_sum : load_upto(y + i, count) * inverse, y + i, count);
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
  for (int c = 0; c < classes; c++) sum += exact_exp(load_upto(x + c * inner, count) - peak);
  const float16 log_sum = log(sum);
  for (int c = 0; c < classes; c++) {
    const float16 v = load_upto(x + c * inner, count) - peak;
    store_upto(logarithm ? v - log_sum : exact_exp(v) / sum, y + c * inner, count);
  }
}

// log: dx = dy - exp(y) sum(dy); else dx = y (dy - sum(dy y)). dx may be dy or y. Global size: outer
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

// The loss, or one per sample if reduction is NONE; a class that does not exist gives NaN. Sums go by blocks, which
// keeps their rounding small. Global size: 1
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
