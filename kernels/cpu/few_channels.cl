// Convolutions of few input channels on CPUs, by vectors of neighbouring pixels: they need no transposed copy of the images.
//
//   x       row-major [N][groups * depth][height][width]
//   padded  [N][groups * depth][rows][stride_w][cols]: column c of a row with its border is at (c % stride_w, c / stride_w)
//   left    [groups][ceil(lanes / ROWS)][depth * kernel_h * kernel_w][ROWS]: weights, packed by matmul.cl
//   y       row-major [N][groups * lanes][out_height][out_width]
//
// For each tap, neighbouring pixels read neighbours in `padded`. ROWS x COLS sums stay in registers.
// Needs common.cl before it.

#define ROWS 12
#define COLS 32

// Copies rows of images; an image begins at (top, left) of its copy.
// global size: rows, N * channels
WORK_ITEM __kernel void pad_rows(__global const float* restrict x, __global float* restrict padded, const int height,
                                 const int width, const int top, const int left, const int stride_w, const int cols) {
  const int row = (int)get_global_id(0) - top, plane = get_global_id(1);
  const bool inside = row >= 0 && row < height;
  x += (plane * height + row) * width;
  padded += (plane * (int)get_global_size(0) + (int)get_global_id(0)) * stride_w * cols;
  for (int phase = 0; phase < stride_w; phase++) {
    // Columns `first` to `last` of the phase are inside the image.
    const int first = inside ? min(max(left - phase + stride_w - 1, 0) / stride_w, cols) : cols;
    const int last = inside ? max(min((width + left - phase + stride_w - 1) / stride_w, cols), first) : cols;
    __global const float* from = x + phase - left;
    for (int c = 0; c < first; c++) padded[c] = 0.0f;
    if (stride_w == 1)
      for (int c = first; c < last; c++) padded[c] = from[c];
    else
      for (int c = first; c < last; c++) padded[c] = from[c * stride_w];
    for (int c = last; c < cols; c++) padded[c] = 0.0f;
    padded += cols;
  }
}

// Sums COUNT channels of `VECTORS` vectors of pixels. Each COUNT has a function, since compilers unroll a loop into registers
// only if its bound is literal.
#define SUM_TAPS(name, COUNT, VECTORS)                                                                          \
  inline void name(__global const float* restrict x, __global const float* restrict w, float16 sums[ROWS][2],   \
                   const int row0, const int vector0, const int depth, const int kernel_h, const int kernel_w,  \
                   const int stride_w, const int dilation_w, const int plane, const int tap_row, const int cols) { \
    float16 sum[COUNT][VECTORS];                                                                                \
    _Pragma("unroll") for (int m = 0; m < COUNT * VECTORS; m++)                                                 \
      sum[m / VECTORS][m % VECTORS] = sums[row0 + m / VECTORS][vector0 + m % VECTORS];                          \
    x += vector0 * LANES;                                                                                       \
    w += row0;                                                                                                  \
    for (int d = 0; d < depth; d++)                                                                             \
      for (int th = 0; th < kernel_h; th++) {                                                                   \
        __global const float* at = x + d * plane + th * tap_row;                                                \
        for (int tw = 0, phase = 0; tw < kernel_w; tw++) {                                                      \
          float16 pixels[VECTORS];                                                                              \
          _Pragma("unroll") for (int v = 0; v < VECTORS; v++) pixels[v] = vload16(v, at);                       \
          _Pragma("unroll") for (int m = 0; m < COUNT * VECTORS; m++)                                           \
            sum[m / VECTORS][m % VECTORS] =                                                                     \
                fma((float16)(w[m / VECTORS]), pixels[m % VECTORS], sum[m / VECTORS][m % VECTORS]);             \
          w += ROWS;                                                                                            \
          phase += dilation_w % stride_w;                                                                       \
          at += dilation_w % stride_w * cols + dilation_w / stride_w;                                           \
          if (phase >= stride_w) {                                                                              \
            phase -= stride_w;                                                                                  \
            at += 1 - stride_w * cols;                                                                          \
          }                                                                                                     \
        }                                                                                                       \
      }                                                                                                         \
    _Pragma("unroll") for (int m = 0; m < COUNT * VECTORS; m++)                                                 \
      sums[row0 + m / VECTORS][vector0 + m % VECTORS] = sum[m / VECTORS][m % VECTORS];                          \
  }
#define TAPS(row, vector) \
  at, w, sums, row, vector, depth, kernel_h, kernel_w, stride_w, dilation_w, rows * stride_w * cols, \
      dilation_h * stride_w * cols, cols
#ifndef NARROW
SUM_TAPS(sum_1, 1, 2)
SUM_TAPS(sum_4, 4, 2)
SUM_TAPS(sum_8, 8, 2)
SUM_TAPS(sum_12, ROWS, 2)
SUM_TAPS(sum_12_half, ROWS, 1)
#else  // in parts for 16 registers of 8 floats
SUM_TAPS(sum_1, 1, 2)
SUM_TAPS(sum_4_half, 4, 1)
SUM_TAPS(sum_6_half, 6, 1)
#endif

// Computes bands of `band` rows for a panel of channels.
// global size: panels of channels in a group, bands, N * groups
WORK_ITEM __kernel void convolve_rows(__global const float* restrict padded, __global const float* restrict left,
                                      __global const float* restrict bias, const int has_bias, __global float* restrict y,
                                      const int groups, const int depth, const int lanes, const int rows, const int cols,
                                      const int out_height, const int out_width, const int kernel_h, const int kernel_w,
                                      const int stride_h, const int stride_w, const int dilation_h, const int dilation_w,
                                      const int band) {
  const int lane0 = (int)get_global_id(0) * ROWS, count = min(lanes - lane0, ROWS), plane = get_global_id(2);
  const int row1 = min((int)(get_global_id(1) + 1) * band, out_height), channel0 = plane % groups * lanes + lane0;
  const int panels = get_global_size(0), pixels = out_height * out_width;
  __global const float* w = left + (plane % groups * panels + (int)get_global_id(0)) * depth * kernel_h * kernel_w * ROWS;
  padded += plane * depth * rows * stride_w * cols;
  y += (plane / groups * groups * lanes + channel0) * pixels;
  for (int row = (int)get_global_id(1) * band; row < row1; row++) {
    for (int col = 0; col < out_width; col += COLS) {
      __global const float* at = padded + row * stride_h * stride_w * cols + col;
      __global float* to = y + row * out_width + col;
      for (int m = 0; m < count; m++) {
        PREFETCH_WRITE(to + m * pixels);
        PREFETCH_WRITE(to + m * pixels + LANES);
      }
      float16 sums[ROWS][2];
#pragma unroll
      for (int m = 0; m < ROWS; m++)
        sums[m][0] = sums[m][1] = (float16)(has_bias && m < count ? bias[channel0 + m] : 0.0f);
#ifndef NARROW
      if (count > 1 && out_width - col <= LANES)
        sum_12_half(TAPS(0, 0));
      else if (count > 8)
        sum_12(TAPS(0, 0));
      else if (count > 4)
        sum_8(TAPS(0, 0));
      else if (count > 1)
        sum_4(TAPS(0, 0));
      else
        sum_1(TAPS(0, 0));
#else
      if (count == 1) {
        sum_1(TAPS(0, 0));
      } else {
        for (int v = 0; v < (out_width - col > LANES ? 2 : 1); v++)
          if (count > 4)
            for (int m = 0; m < count; m += 6) sum_6_half(TAPS(m, v));
          else
            sum_4_half(TAPS(0, v));
      }
#endif
      for (int m = 0; m < count; m++) {
        store_upto(sums[m][0], to + m * pixels, out_width - col);
        store_upto(sums[m][1], to + m * pixels + LANES, out_width - col - LANES);
      }
    }
  }
}
