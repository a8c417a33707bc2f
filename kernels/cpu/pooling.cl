// Pooling over two-dimensional windows on CPUs.
//
//   x, dx   [planes][height][width]   y, dy, index   [planes][out_h][out_w]
// One work-item owns one plane, so that the backward can add into it in a fixed order. Global size: planes

// Highest value of each window, the first of equals, NaN above all; `index` is h * width + w.
WORK_ITEM __kernel void max_pool(__global const float* restrict x, __global float* restrict y,
                                 __global long* restrict index, const int height, const int width, const int out_h,
                                 const int out_w, const int kernel_h, const int kernel_w, const int stride_h,
                                 const int stride_w, const int pad_h, const int pad_w, const int dilation_h,
                                 const int dilation_w) {
  const int plane = get_global_id(0);
  x += plane * height * width;
  y += plane * out_h * out_w;
  index += plane * out_h * out_w;
  for (int oh = 0; oh < out_h; oh++) {
    for (int ow = 0; ow < out_w; ow++) {
      int h0 = oh * stride_h - pad_h, w0 = ow * stride_w - pad_w;
      const int h1 = min(h0 + (kernel_h - 1) * dilation_h + 1, height);
      const int w1 = min(w0 + (kernel_w - 1) * dilation_w + 1, width);
      while (h0 < 0) h0 += dilation_h;
      while (w0 < 0) w0 += dilation_w;
      float best = -INFINITY;
      int at = h0 * width + w0;
      for (int h = h0; h < h1; h += dilation_h) {
        for (int w = w0; w < w1; w += dilation_w) {
          const float value = x[h * width + w];
          if (value > best || isnan(value)) {
            best = value;
            at = h * width + w;
          }
        }
      }
      y[oh * out_w + ow] = best;
      index[oh * out_w + ow] = at;
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

// Bounds of a window; `padded` is its size with the padding that it covers.
typedef struct {
  int first, last, padded;
} Window;

// A plain window of `kernel_` every `stride`, or, if stride is 0, one of `outputs` bins that cover `size`.
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

// What a window's sum is divided by: `divisor` if given, else its elements, with or without padding.
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
