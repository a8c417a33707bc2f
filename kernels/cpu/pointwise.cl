// 1x1 convolutions without padding on CPUs, and their input gradients: products of a matrix with the pixels of images.
//
//   x     row-major [N][groups * depth][pixels]    left  [groups][ceil(rows / ROWS)][depth][ROWS]: packed by matmul.cl
//   y     row-major [N][groups * rows][pixels]     room  [work-items][panels][depth][COLS]
//
// Pixels of all images follow each other as columns. A work-item copies a block of columns into panels, in its own part of
// `room`, which stays in a second-level cache while all rows are multiplied with it: x is read from memory once.
// With a stride the grid of `grid_w` pixels a row is sparse in x (x_step > 1), or for the input gradient in y (y_step > 1).
// Follows common.cl and matmul.cl with EPILOGUE.

#define MOST_COLS 512

// The place of each column of a block in its tensor, in floats; whether the 16 from a multiple of 16 on are neighbours; and
// how many rows and columns of y's pixels a column fills: itself, and zeros.
typedef struct {
  int at[MOST_COLS];
  bool run[MOST_COLS / LANES];
} Places;

inline void find_places(Places* places, const int first, const int count, const int pixels, const int grid_w,
                        const int image_size, const int width, const int step) {
  int image = first / pixels, row = first % pixels / grid_w, col = first % pixels % grid_w;
  for (int c = 0; c < count; c++) {
    places->at[c] = image * image_size + (row * width + col) * step;
    if (++col == grid_w) {
      col = 0;
      if (++row == pixels / grid_w) {
        row = 0;
        image++;
      }
    }
  }
  for (int c = 0; c < count; c += LANES)
    places->run[c / LANES] =
        step == 1 && c + LANES <= count && places->at[c + LANES - 1] == places->at[c] + LANES - 1;
}

inline void pack_block(__global const float* x, const Places* places, const int count, const int depth, const int plane,
                       __global float* room) {
  for (int k = 0; k < depth; k++) {
    for (int c = 0; c < count; c += LANES) {
      __global float* to = room + (c / COLS * depth + k) * COLS + c % COLS;
      const int* at = places->at + c;
      if (places->run[c / LANES]) {
        vstore16(vload16(0, x + at[0]), 0, to);
      } else {
        for (int i = 0; i < LANES; i++) to[i] = c + i < count ? x[at[i]] : 0.0f;
      }
    }
    if ((count - 1) % COLS < LANES) vstore16((float16)(0.0f), 0, room + (count / COLS * depth + k) * COLS + LANES);
    x += plane;
  }
}

// One column of a row of y where these are sparse: the value, and zeros beside and below it as far as the image goes.
inline void store_sparse(const float value, __global float* y, const int at, const int width, const int plane,
                         const int step) {
  const int down = min(step, (plane - at % plane + width - 1) / width), right = min(step, width - at % plane % width);
  for (int r = 0; r < down; r++)
    for (int c = 0; c < right; c++) y[at + r * width + c] = r + c == 0 ? value : 0.0f;
}

// 16 columns of a row of y, of which `count` exist.
inline void store_columns(const float16 values, __global float* y, const int* at, const bool run, const int count,
                          const int width, const int plane, const int step) {
  if (run) {
    vstore16(values, 0, y + at[0]);
  } else {
    float lane[LANES];
    vstore16(values, 0, lane);
    for (int i = 0; i < min(count, LANES); i++) {
      if (step == 1)
        y[at[i]] = lane[i];
      else
        store_sparse(lane[i], y, at[i], width, plane, step);
    }
  }
}

// global size: work-items with a part of `room` each; they take blocks of `panels` panels in turn
WORK_ITEM __kernel void pointwise(__global const float* restrict left, __global const float* restrict x,
                                  __global const float* restrict bias, const int has_bias, __global float* restrict y,
                                  __global float* restrict room, const int images, const int groups, const int rows,
                                  const int depth, const int panels, const int pixels, const int grid_w,
                                  const int x_width, const int x_plane, const int x_step, const int y_width,
                                  const int y_plane, const int y_step) {
  const int row_panels = (rows + ROWS - 1) / ROWS, columns = images * pixels, width = panels * COLS;
  const int blocks = (columns + width - 1) / width;
  room += (int)get_global_id(0) * panels * depth * COLS;
  Places from, to;
  for (int unit = get_global_id(0); unit < groups * blocks; unit += get_global_size(0)) {
    const int group = unit / blocks, first = unit % blocks * width, count = min(columns - first, width);
    find_places(&from, first, count, pixels, grid_w, groups * depth * x_plane, x_width, x_step);
    find_places(&to, first, count, pixels, grid_w, groups * rows * y_plane, y_width, y_step);
    pack_block(x + group * depth * x_plane, &from, count, depth, x_plane, room);
    for (int i = 0; i < row_panels; i++) {
      __global const float* a = left + (group * row_panels + i) * depth * ROWS;
      const int row0 = i * ROWS, row_count = min(rows - row0, ROWS);
      __global float* out = y + (group * rows + row0) * y_plane;
      for (int c = 0; c < count; c += COLS) {
        const int* at = to.at + c;
        if (to.run[c / LANES])
          for (int m = 0; m < row_count; m++) {
            PREFETCH_WRITE(out + m * y_plane + at[0]);
            PREFETCH_WRITE(out + m * y_plane + at[0] + LANES);
          }
        float16 sums[ROWS][2];
        multiply_rows(a, room + c * depth, row_count, depth, sums);
        for (int m = 0; m < row_count; m++) {
          const float start = has_bias ? bias[group * rows + row0 + m] : 0.0f;
          for (int n = 0; n < 2; n++) {
            const int lane0 = n * LANES;
            if (c + lane0 < count)
              store_columns(sums[m][n] + start, out + m * y_plane, at + lane0, to.run[(c + lane0) / LANES],
                            count - c - lane0, y_width, y_plane, y_step);
          }
        }
      }
    }
  }
}
