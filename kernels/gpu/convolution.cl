// Convolutions on GPUs: the products of kernels/patches.cl.
//
// The size of the filter and the strides are options, KERNEL_H, KERNEL_W, STRIDE_H and STRIDE_W: the compiler then replaces
// divisions by them. A work-item loads one column of a tile, so it finds the place of the column's pixel only once.
//
// global size: column tiles, row tiles (each times GROUP), splits * groups

#define FILTER (KERNEL_H * KERNEL_W)
#define GROUP_NUMBER ((int)get_group_id(2) % groups)
#define SPLIT ((int)get_group_id(2) / groups)
#define MY_COLUMN (COL0 + LINE_LINES(0, B_WIDTH))

#define LOAD_4(x, at, is_inside) ((is_inside) ? *(__global const float4*)(x + (at)) : (float4)(0.0f))
#define LOAD_1(x, at, is_inside) ((is_inside) ? x[at] : 0.0f)

// The element that tap `k % FILTER` of channel `k / FILTER` reads; the first tap reads (top, left). 0 in the border.
inline float tap_of_x(__global const float* x, const int k, const int top, const int left, const bool exists,
                      const int height, const int width, const int dilation_h, const int dilation_w) {
  const int tap = k % FILTER, row = top + tap / KERNEL_W * dilation_h, col = left + tap % KERNEL_W * dilation_w;
  const bool is_inside = exists && row >= 0 && row < height && col >= 0 && col < width;
  const int at = (k / FILTER * height + row) * width + col;
  return is_inside ? x[at] : 0.0f;
}

// The element of dy whose tap `k % FILTER` of channel `k / FILTER` reads a pixel of x; (bottom, right) is the place of the
// first tap's element times the stride. 0 if there is no such element.
inline float tap_of_dy(__global const float* dy, const int k, const int bottom, const int right, const bool exists,
                       const int out_height, const int out_width, const int dilation_h, const int dilation_w) {
  const int tap = k % FILTER, row = bottom - tap / KERNEL_W * dilation_h, col = right - tap % KERNEL_W * dilation_w;
  const int r = row / STRIDE_H, c = col / STRIDE_W;
  const bool is_there = exists && row >= 0 && col >= 0 && r * STRIDE_H == row && c * STRIDE_W == col;
  const int at = (k / FILTER * out_height + r) * out_width + c;
  return is_there && r < out_height && c < out_width ? dy[at] : 0.0f;
}

#define W_FORWARD(line, k, exists) \
  JOIN(LOAD_, A_WIDTH)(w, (group * LANES + ROW0 + (line)) * depth + (k), (exists) && ROW0 + (line) < LANES)
// A vector has neighbouring pixels of a filter with one tap.
#define X_4(k, exists) LOAD_4(images_x, place + (k) * PIXELS, (exists) && pixel < columns)
#define X_1(k, exists) \
  tap_of_x(images_x, k, top, left, (exists) && pixel < columns, height, width, dilation_h, dilation_w)
#define X_FORWARD(line, k, exists) JOIN(X_, B_WIDTH)(k, exists)

WORK_GROUP __kernel void forward(__global const float* x, __global const float* w, __global const float* bias,
                                 const int has_bias, SHAPE, RESULTS) {
  TILES;
  const int group = GROUP_NUMBER, columns = images * OUT_PIXELS, depth = CHANNELS_IN * FILTER;
  const int pixel = MY_COLUMN, place = pixel % OUT_PIXELS;
  const int top = place / out_width * STRIDE_H - pad_h, left = place % out_width * STRIDE_W - pad_w;
  __global const float* images_x = x + (pixel / OUT_PIXELS * in_channels + group * CHANNELS_IN) * PIXELS;
  MULTIPLY(W_FORWARD, X_FORWARD, 0, depth)
  EACH(LANES, columns)
    const int number = group * LANES + row;
    STORE((col / OUT_PIXELS * out_channels + number) * OUT_PIXELS + col % OUT_PIXELS,
          has_bias ? sum + bias[number] : sum);
  EACH_END
}

// With one tap, rows are neighbours in memory, else taps are.
#define W_INPUT(line, k, exists)                                                                               \
  JOIN(LOAD_, A_WIDTH)                                                                                         \
  (w, ((group * LANES + (k) / FILTER) * CHANNELS_IN + ROW0 + (line)) * FILTER + (k) % FILTER,                  \
   (exists) && ROW0 + (line) < CHANNELS_IN)
#define DY_4(k, exists) LOAD_4(images_dy, place + (k) * OUT_PIXELS, (exists) && pixel < columns)
#define DY_1(k, exists) \
  tap_of_dy(images_dy, k, bottom, right, (exists) && pixel < columns, out_height, out_width, dilation_h, dilation_w)
#define DY_INPUT(line, k, exists) JOIN(DY_, B_WIDTH)(k, exists)

WORK_GROUP __kernel void input_gradient(__global const float* dy, __global const float* w,
                                        __global const float* bias, const int has_bias, SHAPE, RESULTS) {
  TILES;
  const int group = GROUP_NUMBER, columns = images * PIXELS, depth = LANES * FILTER;
  const int pixel = MY_COLUMN, place = pixel % PIXELS;
  const int bottom = place / width + pad_h, right = place % width + pad_w;
  __global const float* images_dy = dy + (pixel / PIXELS * out_channels + group * LANES) * OUT_PIXELS;
  MULTIPLY(W_INPUT, DY_INPUT, 0, depth)
  EACH(CHANNELS_IN, columns)
    const int number = group * CHANNELS_IN + row;
    STORE((col / PIXELS * in_channels + number) * PIXELS + col % PIXELS, has_bias ? sum + bias[number] : sum);
  EACH_END
}

#define DY_WEIGHT(line, k, exists)                                                                           \
  JOIN(LOAD_, A_WIDTH)                                                                                       \
  (dy, ((k) / OUT_PIXELS * out_channels + group * LANES + ROW0 + (line)) * OUT_PIXELS + (k) % OUT_PIXELS,    \
   (exists) && ROW0 + (line) < LANES)
#define X_WEIGHT(line, k, exists)                                                                            \
  tap_of_x(x + ((k) / OUT_PIXELS * in_channels + group * CHANNELS_IN) * PIXELS, COL0 + (line),               \
           (k) % OUT_PIXELS / out_width * STRIDE_H - pad_h, (k) % OUT_PIXELS % out_width * STRIDE_W - pad_w, \
           (exists) && COL0 + (line) < columns, height, width, dilation_h, dilation_w)

// dw [splits][Co][Ci / groups][kh][kw] has parts of the sums, which the caller adds
WORK_GROUP __kernel void weight_gradient(__global const float* dy, __global const float* x, SHAPE, const int each,
                                         RESULTS) {
  TILES;
  const int group = GROUP_NUMBER, split = SPLIT, columns = CHANNELS_IN * FILTER;
  MULTIPLY(DY_WEIGHT, X_WEIGHT, split * each, min(images * OUT_PIXELS, (split + 1) * each))
  EACH(LANES, columns)
    STORE((split * out_channels + group * LANES + row) * columns + col, sum);
  EACH_END
}
