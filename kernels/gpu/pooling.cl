// Pooling over two-dimensional windows on graphics cards.
//
//   x, dx   [planes][height][width]   y, dy, index   [planes][out_h][out_w]
// A work-item computes one element of the result. For a gradient it visits the windows that contain its pixel, so nothing is
// added in memory and the order is fixed.

#define WORK_GROUP __attribute__((reqd_work_group_size(GROUP, 1, 1)))

// The highest value of a window; NaN exceeds all. `index`, h * width + w, is its first place.
WORK_GROUP __kernel void max_pool(__global const float* restrict x, __global float* restrict y,
                                  __global long* restrict index, const int count, const int height, const int width,
                                  const int out_h, const int out_w, const int kernel_h, const int kernel_w,
                                  const int stride_h, const int stride_w, const int pad_h, const int pad_w,
                                  const int dilation_h, const int dilation_w) {
  const int element = get_global_id(0);
  if (element >= count) return;
  const int ow = element % out_w, oh = element / out_w % out_h;
  x += element / (out_h * out_w) * height * width;
  int h0 = oh * stride_h - pad_h, w0 = ow * stride_w - pad_w;
  const int h1 = min(h0 + (kernel_h - 1) * dilation_h + 1, height), w1 = min(w0 + (kernel_w - 1) * dilation_w + 1, width);
  while (h0 < 0) h0 += dilation_h;
  while (w0 < 0) w0 += dilation_w;
  float best = -INFINITY;
  int at = h0 * width + w0;
  for (int h = h0; h < h1; h += dilation_h)
    for (int w = w0; w < w1; w += dilation_w) {
      const float value = x[h * width + w];
      if (value > best || isnan(value)) {
        best = value;
        at = h * width + w;
      }
    }
  y[element] = best;
  index[element] = at;
}

// The windows from `first` to `last` along a dimension may contain coordinate `at`; `reach` is the size of a window.
#define FIRST(at, reach, stride, pad) max(((at) + (pad) - (reach) + (stride)) / (stride), 0)
#define LAST(at, stride, pad, windows) min(((at) + (pad)) / (stride), (windows) - 1)

WORK_GROUP __kernel void max_pool_backward(__global const float* restrict dy, __global const long* restrict index,
                                           __global float* restrict dx, const int count, const int height,
                                           const int width, const int out_h, const int out_w, const int kernel_h,
                                           const int kernel_w, const int stride_h, const int stride_w, const int pad_h,
                                           const int pad_w, const int dilation_h, const int dilation_w) {
  const int element = get_global_id(0);
  if (element >= count) return;
  const int pixel = element % (height * width), h = pixel / width, w = pixel % width;
  const int plane = element / (height * width) * out_h * out_w;
  const int reach_h = (kernel_h - 1) * dilation_h + 1, reach_w = (kernel_w - 1) * dilation_w + 1;
  const int last_h = LAST(h, stride_h, pad_h, out_h), last_w = LAST(w, stride_w, pad_w, out_w);
  float sum = 0.0f;
  for (int oh = FIRST(h, reach_h, stride_h, pad_h); oh <= last_h; oh++)
    for (int ow = FIRST(w, reach_w, stride_w, pad_w); ow <= last_w; ow++) {
      const int from = plane + oh * out_w + ow;
      if (index[from] == pixel) sum += dy[from];
    }
  dx[element] = sum;
}

// Bounds of a window; `padded` is its size including padding.
typedef struct {
  int first, last, padded;
} Window;

// A window of size `kernel_` every `stride` elements or, if stride is 0, one of `outputs` bins that cover `size`.
static inline Window window(const int o, const int size, const int outputs, const int kernel_, const int stride,
                            const int pad) {
  Window w;
  w.first = stride == 0 ? o * size / outputs : o * stride - pad;
  w.last = stride == 0 ? ((o + 1) * size + outputs - 1) / outputs : min(w.first + kernel_, size + pad);
  w.padded = w.last - w.first;
  w.first = max(w.first, 0);
  w.last = min(w.last, size);
  return w;
}

// The divisor of a window's sum: `divisor` if it is given, else the number of elements, with or without padding.
static inline float window_count(const Window h, const Window w, const int include_pad, const int divisor) {
  if (divisor != 0) return (float)divisor;
  return include_pad ? (float)(h.padded * w.padded) : (float)((h.last - h.first) * (w.last - w.first));
}

WORK_GROUP __kernel void mean_pool(__global const float* restrict x, __global float* restrict y, const int count,
                                   const int height, const int width, const int out_h, const int out_w,
                                   const int kernel_h, const int kernel_w, const int stride_h, const int stride_w,
                                   const int pad_h, const int pad_w, const int include_pad, const int divisor) {
  const int element = get_global_id(0);
  if (element >= count) return;
  const Window rows = window(element / out_w % out_h, height, out_h, kernel_h, stride_h, pad_h);
  const Window cols = window(element % out_w, width, out_w, kernel_w, stride_w, pad_w);
  x += element / (out_h * out_w) * height * width;
  float sum = 0.0f;
  for (int h = rows.first; h < rows.last; h++)
    for (int w = cols.first; w < cols.last; w++) sum += x[h * width + w];
  y[element] = sum / window_count(rows, cols, include_pad, divisor);
}

// The first and the last window that may contain coordinate `at`. Bins overlap by at most one element at each end.
static inline int first_window(const int at, const int size, const int outputs, const int kernel_, const int stride,
                               const int pad) {
  return stride == 0 ? at * outputs / size : FIRST(at, kernel_, stride, pad);
}

static inline int last_window(const int at, const int size, const int outputs, const int stride, const int pad) {
  return stride == 0 ? ((at + 1) * outputs - 1) / size : LAST(at, stride, pad, outputs);
}

WORK_GROUP __kernel void mean_pool_backward(__global const float* restrict dy, __global float* restrict dx,
                                            const int count, const int height, const int width, const int out_h,
                                            const int out_w, const int kernel_h, const int kernel_w, const int stride_h,
                                            const int stride_w, const int pad_h, const int pad_w,
                                            const int include_pad, const int divisor) {
  const int element = get_global_id(0);
  if (element >= count) return;
  const int h = element / width % height, w = element % width;
  const int last_h = last_window(h, height, out_h, stride_h, pad_h), last_w = last_window(w, width, out_w, stride_w, pad_w);
  dy += element / (height * width) * out_h * out_w;
  float sum = 0.0f;
  for (int oh = first_window(h, height, out_h, kernel_h, stride_h, pad_h); oh <= last_h; oh++) {
    const Window rows = window(oh, height, out_h, kernel_h, stride_h, pad_h);
    for (int ow = first_window(w, width, out_w, kernel_w, stride_w, pad_w); ow <= last_w; ow++) {
      const Window cols = window(ow, width, out_w, kernel_w, stride_w, pad_w);
      sum += dy[oh * out_w + ow] / window_count(rows, cols, include_pad, divisor);
    }
  }
  dx[element] = sum;
}
