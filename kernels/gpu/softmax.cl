// Softmax and log-softmax of rows on graphics cards. Needs rows.cl before it.
//
//   x, y, dy, dx   [rows][classes]

WORK_GROUP __kernel void softmax_rows(__global const float* restrict x, __global float* restrict y, const int rows,
                                      const int classes, const int logarithm) {
  __local float tree[GROUP];
  const int row = ROW, count = row < rows ? classes : 0;
  x += row * classes;
  y += row * classes;
  float highest = -INFINITY, sum = 0.0f;
  EACH(i, count) highest = fmax(highest, x[i]);
  const float peak = peak_of_row(highest, tree);
  EACH(i, count) sum += exp(x[i] - peak);
  const float total = sum_of_row(sum, tree), shift = logarithm ? log(total) : 0.0f, scale = 1.0f / total;
  EACH(i, count) {
    const float v = x[i] - peak;
    y[i] = logarithm ? v - shift : exp(v) * scale;
  }
}

// dx = y (dy - sum(dy y)). dx may be dy or y.
WORK_GROUP __kernel void softmax_backward_rows(__global const float* dy, __global const float* y, __global float* dx,
                                               const int rows, const int classes) {
  __local float tree[GROUP];
  const int row = ROW, count = row < rows ? classes : 0;
  dy += row * classes;
  y += row * classes;
  dx += row * classes;
  float sum = 0.0f;
  EACH(i, count) sum = fma(dy[i], y[i], sum);
  const float total = sum_of_row(sum, tree);
  EACH(i, count) dx[i] = y[i] * (dy[i] - total);
}
