// Convolutions with more output channels than pixels, and their gradients, on CPUs: products of weights and patches of images.
// Reading the weights, or writing their gradient, takes most of the time, so the products use them without a copy.
//
//   forward          y[co][pixel]    = w[co][tap]     x[tap][pixel]      sums over ci and taps
//   input gradient   taps[pixel][tap] = dy[pixel][co]  w[co][tap]         sums over co; `fold_patches` adds the taps
//   weight gradient  dw[co][tap]     = dy[co][pixel]  x[pixel][tap]      sums over pixels
//
// A tap is a channel and a place in the kernel, in the order of the weights: [Ci][kernel_h][kernel_w]. Pixels are counted
// through all images. Tensors are [N][C][H][W]. Needs common.cl and unpacked.cl before it.

#define WINDOW                                                                                                  \
  const int depth, const int height, const int width, const int out_height, const int out_width, const int kernel_h, \
      const int kernel_w, const int stride_h, const int stride_w, const int padding_h, const int padding_w,     \
      const int dilation_h, const int dilation_w

// The place in an image's first plane that pixel `at` of y reads for tap `tap`, or -1 in the border.
#define MEETS(at, tap) \
  meets(at, tap, depth, height, width, out_height, out_width, kernel_w, stride_h, stride_w, padding_h, padding_w, \
        dilation_h, dilation_w)

inline int meets(const int at, const int tap, const int depth, const int height, const int width, const int out_height,
                 const int out_width, const int kernel_w, const int stride_h, const int stride_w, const int padding_h,
                 const int padding_w, const int dilation_h, const int dilation_w) {
  const int pixels = out_height * out_width, image = at / pixels, pixel = at % pixels;
  const int row = pixel / out_width * stride_h - padding_h + tap / kernel_w * dilation_h;
  const int col = pixel % out_width * stride_w - padding_w + tap % kernel_w * dilation_w;
  const bool inside = row >= 0 && row < height && col >= 0 && col < width;
  return inside ? (image * depth * height + row) * width + col : -1;
}

// Copies patches as [panels of COLS pixels][depth * taps][COLS]; pixels that do not exist are zero.
// global size: panels, taps
WORK_ITEM __kernel void patches_of_rows(__global const float* restrict x, __global float* restrict patches,
                                        const int images, WINDOW) {
  const int first = (int)get_global_id(0) * COLS, tap = get_global_id(1), taps = get_global_size(1);
  const int count = images * out_height * out_width, plane = height * width;
  int from[COLS];
  for (int i = 0; i < COLS; i++) from[i] = first + i < count ? MEETS(first + i, tap) : -1;
  patches += ((int)get_global_id(0) * depth * taps + tap) * COLS;
  for (int d = 0; d < depth; d++) {
    for (int i = 0; i < COLS; i++) patches[i] = from[i] < 0 ? 0.0f : x[from[i] + d * plane];
    patches += taps * COLS;
  }
}

// Copies patches as [pixels][depth * taps].
// global size: pixels
WORK_ITEM __kernel void patches_of_pixels(__global const float* restrict x, __global float* restrict patches, WINDOW) {
  const int pixel = get_global_id(0), taps = kernel_h * kernel_w, plane = height * width;
  patches += pixel * depth * taps;
  for (int tap = 0; tap < taps; tap++) {
    const int from = MEETS(pixel, tap);
    for (int d = 0; d < depth; d++) patches[d * taps + tap] = from < 0 ? 0.0f : x[from + d * plane];
  }
}

// Adds up dx from patches [pixels][depth * taps], the products of dy and weights.
// global size: N, chunks of 16 channels
WORK_ITEM __kernel void fold_patches(__global const float* restrict patches, __global float* restrict dx, WINDOW) {
  const int image = get_global_id(0), d0 = get_global_id(1) * LANES, count = min(depth - d0, LANES);
  const int taps = kernel_h * kernel_w, plane = height * width, pixels = out_height * out_width;
  __global float* own = dx + (image * depth + d0) * plane;
  for (int i = 0; i < count * plane; i++) own[i] = 0.0f;
  for (int pixel = image * pixels; pixel < (image + 1) * pixels; pixel++)
    for (int tap = 0; tap < taps; tap++) {
      const int at = MEETS(pixel, tap);
      if (at < 0) continue;
      for (int d = d0; d < d0 + count; d++) dx[at + d * plane] += patches[(pixel * depth + d) * taps + tap];
    }
}

// out [rows][cols] = a [rows][depth] b, at least FEW rows and COLS columns; the last rows or columns may overlap the previous
// ones. For k = 0, COLS neighbours of b begin at b[col * b_col]; for each next k, b_row floats later. So b is row-major, or in
// panels of COLS columns.
// global size: whole panels of columns, chunks of `chunk` rows; the last item in each dimension also has the remainder
WORK_ITEM __kernel void multiply(__global const float* restrict a, __global const float* restrict b,
                                 __global float* restrict out, const int rows, const int depth, const int cols,
                                 const int chunk, const int b_row, const int b_col) {
  const int panel = get_global_id(0), col1 = panel + 1 < get_global_size(0) ? (panel + 1) * COLS : cols;
  const int part = get_global_id(1), row0 = part * chunk, row1 = part + 1 < get_global_size(1) ? row0 + chunk : rows;
  for (int begin = panel * COLS; begin < col1; begin += COLS) {
    const int col = min(begin, cols - COLS);
    multiply_panel(a + row0 * depth, depth, b + col * b_col, b_row, row1 - row0, depth, out + row0 * cols + col, cols,
                   false);
  }
}
