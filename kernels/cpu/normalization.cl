// Batch and layer normalisation on CPUs.
//
// Batch: x, y, dy, dx are [N][C][P] (P pixels, any trailing dimensions); one work-item owns one channel.
// Layer: x, y, dy, dx are [rows][D]; mean and rstd are [rows]; weight and bias are [D].
// Sums are kept in 16 lanes; variances are taken about the mean in a second pass.
// Option PAST_CACHES: y is too large for the caches, and its rows are whole lines.

inline float16 valid_lanes(const float16 value, const int count) {
  const float16 index = (float16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return count >= LANES ? value : select((float16)(0.0f), value, index < (float16)((float)count));
}

// Four sums at once, since an addition takes longer than a load.
inline float sum_of(__global const float* x, const int runs, const int stride, const int length) {
  float16 a = (float16)(0.0f), b = a, c = a, d = a;
  for (int n = 0; n < runs; n++, x += stride) {
    int i = 0;
    for (; i + 4 * LANES <= length; i += 4 * LANES) {
      a += vload16(0, x + i);
      b += vload16(1, x + i);
      c += vload16(2, x + i);
      d += vload16(3, x + i);
    }
    for (; i < length; i += LANES) a += load_upto(x + i, length - i);
  }
  return sum_lanes((a + b) + (c + d));
}

inline float squares_about(__global const float* x, const float mean, const int runs, const int stride,
                           const int length) {
  float16 a = (float16)(0.0f), b = a, c = a, d = a;
  for (int n = 0; n < runs; n++, x += stride) {
    int i = 0;
    for (; i + 4 * LANES <= length; i += 4 * LANES) {
      const float16 p = vload16(0, x + i) - mean, q = vload16(1, x + i) - mean;
      const float16 r = vload16(2, x + i) - mean, s = vload16(3, x + i) - mean;
      a = fma(p, p, a);
      b = fma(q, q, b);
      c = fma(r, r, c);
      d = fma(s, s, d);
    }
    for (; i < length; i += LANES) {
      const float16 p = valid_lanes(load_upto(x + i, length - i) - mean, length - i);
      a = fma(p, p, a);
    }
  }
  return sum_lanes((a + b) + (c + d));
}

// y = x * scale + shift
inline void scale_and_shift(__global const float* x, __global float* y, const float scale, const float shift,
                            const int runs, const int stride, const int length) {
  for (int n = 0; n < runs; n++)
    for (int i = 0; i < length; i += LANES)
      store_upto(fma(load_upto(x + n * stride + i, length - i), (float16)(scale), (float16)(shift)),
                 y + n * stride + i, length - i);
}

// y, mean and rstd of the batch; new_mean and new_var move by `momentum` if `has_running`. Global size: C
WORK_ITEM __kernel void batch_norm_train(__global const float* restrict x, __global const float* weight,
                                         const int has_weight, __global const float* bias, const int has_bias,
                                         __global const float* running_mean, __global const float* running_var,
                                         const int has_running, __global float* restrict y,
                                         __global float* restrict save_mean, __global float* restrict save_rstd,
                                         __global float* new_mean, __global float* new_var, const int images,
                                         const int channels, const int pixels, const float momentum,
                                         const float eps) {
  const int c = get_global_id(0), stride = channels * pixels;
  const float count = (float)images * (float)pixels;
  const float mean = sum_of(x + c * pixels, images, stride, pixels) / count;
  const float squares = squares_about(x + c * pixels, mean, images, stride, pixels);
  const float rstd = 1.0f / sqrt(squares / count + eps);
  save_mean[c] = mean;
  save_rstd[c] = rstd;
  if (has_running) {
    new_mean[c] = momentum * mean + (1.0f - momentum) * running_mean[c];
    new_var[c] = momentum * (squares / (count - 1.0f)) + (1.0f - momentum) * running_var[c];
  }
  const float scale = rstd * (has_weight ? weight[c] : 1.0f);
  const float shift = (has_bias ? bias[c] : 0.0f) - mean * scale;
  scale_and_shift(x + c * pixels, y + c * pixels, scale, shift, images, stride, pixels);
}

// Global size: C, N
WORK_ITEM __kernel void batch_norm_infer(__global const float* restrict x, __global const float* weight,
                                         const int has_weight, __global const float* bias, const int has_bias,
                                         __global const float* mean, __global const float* var,
                                         __global float* restrict y, const int channels, const int pixels,
                                         const float eps) {
  const int c = get_global_id(0), at = ((int)get_global_id(1) * channels + c) * pixels;
  const float scale = (has_weight ? weight[c] : 1.0f) / sqrt(var[c] + eps);
  const float shift = (has_bias ? bias[c] : 0.0f) - mean[c] * scale;
  scale_and_shift(x + at, y + at, scale, shift, 1, 0, pixels);
}

// In training, `spread` is rstd of the batch; else it is the running variance. Global size: C
WORK_ITEM __kernel void batch_norm_backward(__global const float* restrict dy, __global const float* restrict x,
                                            __global const float* weight, const int has_weight,
                                            __global const float* center, __global const float* spread,
                                            const int train, const float eps, __global float* restrict dx,
                                            __global float* dweight, __global float* dbias, const int want_dx,
                                            const int want_dweight, const int want_dbias, const int images,
                                            const int channels, const int pixels) {
  const int c = get_global_id(0), stride = channels * pixels;
  const float mean = center[c], rstd = train ? spread[c] : 1.0f / sqrt(spread[c] + eps);
  dy += c * pixels;
  x += c * pixels;
  float16 sums = (float16)(0.0f), dots = (float16)(0.0f);
  for (int n = 0; n < images; n++)
    for (int i = 0; i < pixels; i += LANES) {
      const float16 g = load_upto(dy + n * stride + i, pixels - i);
      sums += g;
      dots = fma(g, load_upto(x + n * stride + i, pixels - i) - mean, dots);
    }
  const float sum = sum_lanes(sums), dot_ = sum_lanes(dots);
  if (want_dweight) dweight[c] = dot_ * rstd;
  if (want_dbias) dbias[c] = sum;
  if (!want_dx) return;
  const float count = (float)images * (float)pixels, scale = rstd * (has_weight ? weight[c] : 1.0f);
  const float mean_dy = train ? sum / count : 0.0f, slope = train ? dot_ * rstd * rstd / count : 0.0f;
  dx += c * pixels;
  for (int n = 0; n < images; n++)
    for (int i = 0; i < pixels; i += LANES) {
      const float16 g = load_upto(dy + n * stride + i, pixels - i);
      const float16 d = load_upto(x + n * stride + i, pixels - i) - mean;
      store_upto((g - mean_dy - d * slope) * scale, dx + n * stride + i, pixels - i);
    }
}

inline void store_normalized(const float16 x, const float mean, const float rstd, __global const float* weight,
                             const int has_weight, __global const float* bias, const int has_bias, __global float* y,
                             const int i, const int count) {
  float16 v = (x - mean) * rstd;
  if (has_weight) v *= load_upto(weight + i, count);
  if (has_bias) v += load_upto(bias + i, count);
#ifdef PAST_CACHES
  STORE_PAST_CACHES(v, y + i);
#else
  store_upto(v, y + i, count);
#endif
}

// While a row is written, the next row is read for its sum, which equals the result of `sum_of` bit for bit.
// Global size: parts of `each` rows
WORK_ITEM __kernel void layer_norm(__global const float* restrict x, __global const float* weight,
                                   const int has_weight, __global const float* bias, const int has_bias,
                                   __global float* restrict y, __global float* restrict save_mean,
                                   __global float* restrict save_rstd, const int rows, const int each,
                                   const int length, const float eps) {
  const int first = (int)get_global_id(0) * each, last = min(rows, first + each);
  float sum = sum_of(x + first * length, 1, 0, length);
  for (int row = first; row < last; row++) {
    __global const float* from = x + row * length;
    __global const float* next = row + 1 < last ? from + length : from;
    __global float* to = y + row * length;
    const float mean = sum / length;
    const float rstd = 1.0f / sqrt(squares_about(from, mean, 1, 0, length) / length + eps);
    save_mean[row] = mean;
    save_rstd[row] = rstd;
    float16 sums[4] = {(float16)(0.0f), (float16)(0.0f), (float16)(0.0f), (float16)(0.0f)};
    int i = 0;
    for (; i + 4 * LANES <= length; i += 4 * LANES) {
#pragma unroll
      for (int n = 0; n < 4; n++) {
        sums[n] += vload16(n, next + i);
        store_normalized(vload16(n, from + i), mean, rstd, weight, has_weight, bias, has_bias, to, i + n * LANES, LANES);
      }
    }
    for (; i < length; i += LANES) {
      const int count = length - i;
      sums[0] += load_upto(next + i, count);
      store_normalized(load_upto(from + i, count), mean, rstd, weight, has_weight, bias, has_bias, to, i, count);
    }
    sum = sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
  }
}

// Global size: rows
WORK_ITEM __kernel void layer_norm_dx(__global const float* restrict dy, __global const float* restrict x,
                                      __global const float* mean, __global const float* rstd,
                                      __global const float* weight, const int has_weight,
                                      __global float* restrict dx, const int length) {
  const int row = get_global_id(0);
  const float center = mean[row], scale = rstd[row];
  dy += row * length;
  x += row * length;
  dx += row * length;
  float16 sums = (float16)(0.0f), dots = (float16)(0.0f);
  for (int i = 0; i < length; i += LANES) {
    float16 g = load_upto(dy + i, length - i);
    if (has_weight) g *= load_upto(weight + i, length - i);
    sums += g;
    dots = fma(g, (load_upto(x + i, length - i) - center) * scale, dots);
  }
  const float mean_g = sum_lanes(sums) / length, mean_dot = sum_lanes(dots) / length;
  for (int i = 0; i < length; i += LANES) {
    float16 g = load_upto(dy + i, length - i);
    if (has_weight) g *= load_upto(weight + i, length - i);
    const float16 h = (load_upto(x + i, length - i) - center) * scale;
    store_upto((g - mean_g - h * mean_dot) * scale, dx + i, length - i);
  }
}

// Gradients of weight and bias, 16 columns each. Global size: blocks of 16 columns
WORK_ITEM __kernel void layer_norm_dparams(__global const float* restrict dy, __global const float* restrict x,
                                           __global const float* mean, __global const float* rstd,
                                           __global float* dweight, __global float* dbias, const int want_dweight,
                                           const int want_dbias, const int rows, const int length) {
  const int i = get_global_id(0) * LANES, count = length - i;
  float16 dw = (float16)(0.0f), db = (float16)(0.0f);
  for (int row = 0; row < rows; row++) {
    const float16 g = load_upto(dy + row * length + i, count);
    dw = fma(g, (load_upto(x + row * length + i, count) - mean[row]) * rstd[row], dw);
    db += g;
  }
  if (want_dweight) store_upto(dw, dweight + i, count);
  if (want_dbias) store_upto(db, dbias + i, count);
}
