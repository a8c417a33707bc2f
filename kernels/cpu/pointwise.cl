// 1x1 convolutions without padding on CPUs, and their input gradients: products of a matrix with the pixels of images.
//
//   x     row-major [N][groups * depth][height][width]    y  row-major [N][groups * rows][out_height][out_width]
//   left  [groups][ceil(rows / ROWS)][depth][ROWS]: packed by matmul.cl
//   room  [work-items][panels][depth][COLS]
//
// The columns are the pixels of all images of y. A work-item copies the pixels of x for a block of columns into panels, in its
// part of `room`. The panels stay in a second-level cache while all rows are multiplied with them: x is read from memory once.
// Needs common.cl, and matmul.cl with EPILOGUE, before it.

#define MOST_COLS 512

// `at`: the place of each column of a block in the first plane of its image, in floats from the first image on. `run`: for
// each 16 columns, whether they are equally far apart.
typedef struct {
  int at[MOST_COLS];
  int run[MOST_COLS / LANES];
} Places;

// Pixel (row, col) of an image is at (row * stride_h, col * stride_w) of a plane of `width`, in images of `image_size` floats.
inline void find_places(Places* places, const int first, const int count, const int rows, const int cols,
                        const int width, const int image_size, const int stride_h, const int stride_w) {
  int row = first / cols % rows, col = first % cols;
  int at = first / (rows * cols) * image_size + row * stride_h * width + col * stride_w;
  const int next_row = stride_h * width - cols * stride_w, next_image = image_size - rows * stride_h * width;
  for (int c = 0; c < count; c++) {
    if (c % LANES == 0) places->run[c / LANES] = c + LANES <= count;
    places->at[c] = at;
    at += stride_w;
    if (++col < cols) continue;
    col = 0;
    at += next_row;
    if (++row == rows) {
      row = 0;
      at += next_image;
    }
    if ((c + 1) % LANES) places->run[c / LANES] = 0;
  }
}

// Loads 16 floats, every `stride`th.
inline float16 load_every(__global const float* p, const int stride) {
  if (stride == 2)  // reads nothing after the last element
    return __builtin_shufflevector(vload16(0, p), vload16(0, p + LANES - 1), 0, 2, 4, 6, 8, 10, 12, 14, 17, 19, 21, 23,
                                   25, 27, 29, 31);
  return load_strided(p, stride, LANES);
}

inline void pack_block(__global const float* x, const Places* places, const int count, const int depth, const int plane,
                       const int stride, __global float* room) {
  for (int k = 0; k < depth; k++) {
    for (int c = 0; c < count; c += LANES) {
      __global float* to = room + (c / COLS * depth + k) * COLS + c % COLS;
      const int* at = places->at + c;
      if (places->run[c / LANES]) {
        vstore16(load_every(x + at[0], stride), 0, to);
      } else {
        for (int i = 0; i < LANES; i++) to[i] = c + i < count ? x[at[i]] : 0.0f;
      }
    }
    if ((count - 1) % COLS < LANES) vstore16((float16)(0.0f), 0, room + (count / COLS * depth + k) * COLS + LANES);
    x += plane;
  }
}

// Stores 16 columns of a row of y, from column c of the block on; `count` of them exist.
inline void store_columns(const float16 values, __global float* y, const Places* places, const int c,
                          const int count) {
  if (places->run[c / LANES]) {
    vstore16(values, 0, y + places->at[c]);
  } else {
    float lane[LANES];
    vstore16(values, 0, lane);
    for (int i = 0; i < min(count, LANES); i++) y[places->at[c + i]] = lane[i];
  }
}

// global size: work-items, each with a part of `room`; they take blocks of `panels` panels in turn
WORK_ITEM __kernel void pointwise(__global const float* restrict left, __global const float* restrict x,
                                  __global const float* restrict bias, const int has_bias, __global float* restrict y,
                                  __global float* restrict room, const int images, const int groups, const int rows,
                                  const int depth, const int panels, const int height, const int width,
                                  const int out_height, const int out_width, const int stride_h, const int stride_w) {
  const int pixels = out_height * out_width, plane = height * width, block_cols = panels * COLS;
  const int row_panels = (rows + ROWS - 1) / ROWS, columns = images * pixels;
  const int blocks = (columns + block_cols - 1) / block_cols;
  room += (int)get_global_id(0) * panels * depth * COLS;
  Places from, to;
  for (int unit = get_global_id(0); unit < groups * blocks; unit += get_global_size(0)) {
    const int group = unit / blocks, first = unit % blocks * block_cols, count = min(columns - first, block_cols);
    // Rows without gaps count as one row.
    if (stride_h == 1 && stride_w == 1)
      find_places(&from, first, count, 1, pixels, pixels, groups * depth * plane, 1, 1);
    else
      find_places(&from, first, count, out_height, out_width, width, groups * depth * plane, stride_h, stride_w);
    find_places(&to, first, count, 1, pixels, pixels, groups * rows * pixels, 1, 1);
    pack_block(x + group * depth * plane, &from, count, depth, plane, stride_w, room);
    for (int i = 0; i < row_panels; i++) {
      __global const float* a = left + (group * row_panels + i) * depth * ROWS;
      const int row0 = i * ROWS, row_count = min(rows - row0, ROWS);
      __global float* out = y + (group * rows + row0) * pixels;
      for (int c = 0; c < count; c += COLS) {
        for (int m = 0; m < row_count; m++) {
          PREFETCH_WRITE(out + m * pixels + to.at[c]);
          PREFETCH_WRITE(out + m * pixels + to.at[c] + LANES);
        }
        float16 sums[ROWS][2];
        multiply_rows(a, STEPS(packed), room + c * depth, row_count, depth, sums);
        for (int m = 0; m < row_count; m++) {
          const float start = has_bias ? bias[group * rows + row0 + m] : 0.0f;
          for (int n = 0; n < 2; n++) {
            const int lane0 = n * LANES;
            if (c + lane0 < count)
              store_columns(sums[m][n] + start, out + m * pixels, &to, c + lane0, count - c - lane0);
          }
        }
      }
    }
  }
}

inline void add_row(__global const float* x, __global float* y, const int count, const int step) {
  int i = 0;
  if (step == 1)
    for (; i + LANES <= count; i += LANES) vstore16(vload16(0, y + i) + vload16(0, x + i), 0, y + i);
  for (; i < count; i++) y[i * step] += x[i];
}

// y [N][channels][height][width] is the bias plus the planes of x [N][channels][kernel_h * kernel_w][rows][cols], one plane per
// tap: each element of a plane is added at the pixel of y that the tap reads, if this pixel exists.
// global size: N, channels
WORK_ITEM __kernel void fold(__global const float* restrict x, __global const float* restrict bias, const int has_bias,
                             __global float* restrict y, const int rows, const int cols, const int height,
                             const int width, const int kernel_h, const int kernel_w, const int stride_h,
                             const int stride_w, const int padding_h, const int padding_w, const int dilation_h,
                             const int dilation_w) {
  const int c = get_global_id(1), plane = (int)get_global_id(0) * (int)get_global_size(1) + c;
  const float16 start = (float16)(has_bias ? bias[c] : 0.0f);
  x += plane * kernel_h * kernel_w * rows * cols;
  y += plane * height * width;
  for (int i = 0; i < height * width; i += LANES) store_upto(start, y + i, height * width - i);
  for (int tap = 0; tap < kernel_h * kernel_w; tap++) {
    const int top = tap / kernel_w * dilation_h - padding_h, left = tap % kernel_w * dilation_w - padding_w;
    const int first = left < 0 ? (stride_w - 1 - left) / stride_w : 0;  // the first column inside y
    const int last = min(cols, left < width ? (width - 1 - left) / stride_w + 1 : 0);
    for (int row = 0; row < rows; row++, x += cols) {
      const int to = row * stride_h + top;
      if (to >= 0 && to < height)
        add_row(x + first, y + to * width + first * stride_w + left, last - first, stride_w);
    }
  }
}
