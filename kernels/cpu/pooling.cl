// Pooling over two-dimensional windows on CPUs.
//
//   x, dx   [planes][height][width]   y, dy, index   [planes][out_h][out_w]
// One work-item owns one plane, so that the backward adds into it in a fixed order. Global size: planes

// 16 elements of a row from column `first` on, every `stride`th; -infinity outside the row.
inline float16 row_lanes(__global const float* row, const int first, const int stride, const int width) {
  if (first >= 0 && first + (LANES - 1) * stride < width) {
    if (stride == 1) return vload16(0, row + first);
    if (stride == 2)  // reads nothing after the last element
      return __builtin_shufflevector(vload16(0, row + first), vload16(0, row + first + LANES - 1), 0, 2, 4, 6, 8, 10, 12,
                                     14, 17, 19, 21, 23, 25, 27, 29, 31);
  }
  float lane[LANES];
  for (int i = 0; i < LANES; i++) {
    const int col = first + i * stride;
    lane[i] = col >= 0 && col < width ? row[col] : -INFINITY;
  }
  return vload16(0, lane);
}

// The highest value of each window; NaN exceeds all. `index`, h * width + w, is its first place. 16 windows at a time.
WORK_ITEM __kernel void max_pool(__global const float* restrict x, __global float* restrict y,
                                 __global long* restrict index, const int height, const int width, const int out_h,
                                 const int out_w, const int kernel_h, const int kernel_w, const int stride_h,
                                 const int stride_w, const int pad_h, const int pad_w, const int dilation_h,
                                 const int dilation_w) {
  const int plane = get_global_id(0);
  const int16 steps = (int16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15) * stride_w;
  x += plane * height * width;
  y += plane * out_h * out_w;
  index += plane * out_h * out_w;
  for (int oh = 0; oh < out_h; oh++) {
    int h0 = oh * stride_h - pad_h;
    const int h1 = min(h0 + (kernel_h - 1) * dilation_h + 1, height);
    while (h0 < 0) h0 += dilation_h;
    for (int ow = 0; ow < out_w; ow += LANES) {
      const int first = ow * stride_w - pad_w, count = min(out_w - ow, LANES);
      int16 at = first + steps;
      for (int left = first; left < 0; left += dilation_w) at = select(at, at + dilation_w, at < 0);
      at += h0 * width;
      float16 best = (float16)(-INFINITY);
      for (int h = h0; h < h1; h += dilation_h) {
        for (int tap = 0; tap < kernel_w; tap++) {
          const int w = first + tap * dilation_w;
          const float16 value = row_lanes(x + h * width, w, stride_w, width);
          const int16 higher = value > best || isnan(value);
          best = select(best, value, higher);
          at = select(at, h * width + w + steps, higher);
        }
      }
      store_upto(best, y + oh * out_w + ow, count);
      if (count == LANES) {
        vstore16(convert_long16(at), 0, index + oh * out_w + ow);
      } else {
        int lane[LANES];
        vstore16(at, 0, lane);
        for (int i = 0; i < count; i++) index[oh * out_w + ow + i] = lane[i];
      }
    }
  }
}

WORK_ITEM __kernel void max_pool_backward(__global const float* restrict dy, __global const long* restrict index,
                                          __global float* restrict dx, const int pixels, const int out_pixels) {
  const int plane = get_global_id(0);
  dx += plane * pixels;
  for (int i = 0; i < pixels; i += LANES) store_upto((float16)(0.0f), dx + i, pixels - i);
  for (int o = 0; o < out_pixels; o++) {
    const int at = (int)index[plane * out_pixels + o];
    dx[at] += dy[plane * out_pixels + o];
  }
}

// Bounds of a window; `padded` is its size including padding.
typedef struct {
  int first, last, padded;
} Window;

// A window of size `kernel_` every `stride` elements or, if stride is 0, one of `outputs` bins that cover `size`.
inline Window window(const int o, const int size, const int outputs, const int kernel_, const int stride,
                     const int pad) {
  Window w;
  if (stride == 0) {
    w.first = o * size / outputs;
    w.last = ((o + 1) * size + outputs - 1) / outputs;
    w.padded = w.last - w.first;
  } else {
    const int first = o * stride - pad, last = min(first + kernel_, size + pad);
    w.padded = last - first;
    w.first = max(first, 0);
    w.last = min(last, size);
  }
  return w;
}

// The divisor of a window's sum: `divisor` if it is given, else the number of elements, with or without padding.
inline float window_count(const Window h, const Window w, const int include_pad, const int divisor) {
  if (divisor != 0) return (float)divisor;
  return include_pad ? (float)(h.padded * w.padded) : (float)((h.last - h.first) * (w.last - w.first));
}

WORK_ITEM __kernel void mean_pool(__global const float* restrict x, __global float* restrict y, const int height,
                                  const int width, const int out_h, const int out_w, const int kernel_h,
                                  const int kernel_w, const int stride_h, const int stride_w, const int pad_h,
                                  const int pad_w, const int include_pad, const int divisor) {
  const int plane = get_global_id(0);
  x += plane * height * width;
  y += plane * out_h * out_w;
  for (int oh = 0; oh < out_h; oh++) {
    const Window rows = window(oh, height, out_h, kernel_h, stride_h, pad_h);
    for (int ow = 0; ow < out_w; ow++) {
      const Window cols = window(ow, width, out_w, kernel_w, stride_w, pad_w);
      float sum = 0.0f;
      for (int h = rows.first; h < rows.last; h++)
        for (int w = cols.first; w < cols.last; w++) sum += x[h * width + w];
      y[oh * out_w + ow] = sum / window_count(rows, cols, include_pad, divisor);
    }
  }
}

WORK_ITEM __kernel void mean_pool_backward(__global const float* restrict dy, __global float* restrict dx,
                                           const int height, const int width, const int out_h, const int out_w,
                                           const int kernel_h, const int kernel_w, const int stride_h,
                                           const int stride_w, const int pad_h, const int pad_w,
                                           const int include_pad, const int divisor) {
  const int plane = get_global_id(0), pixels = height * width;
  dx += plane * pixels;
  dy += plane * out_h * out_w;
  for (int i = 0; i < pixels; i += LANES) store_upto((float16)(0.0f), dx + i, pixels - i);
  for (int oh = 0; oh < out_h; oh++) {
    const Window rows = window(oh, height, out_h, kernel_h, stride_h, pad_h);
    for (int ow = 0; ow < out_w; ow++) {
      const Window cols = window(ow, width, out_w, kernel_w, stride_w, pad_w);
      const float share = dy[oh * out_w + ow] / window_count(rows, cols, include_pad, divisor);
      for (int h = rows.first; h < rows.last; h++)
        for (int w = cols.first; w < cols.last; w++) dx[h * width + w] += share;
    }
  }
}
