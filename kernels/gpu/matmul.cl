// Matrix products on GPUs: C = alpha * A B + beta * bias, batched, any strides.
//
//   C  [splits][batches][rows][cols]   `splits` parts of the sum over k (usually 1), which the caller adds
//
// global size: column tiles, row tiles (each times GROUP), splits * batches

// A vector's elements are neighbours along k if A_ALONG is K, else along the rows; the host checks that they exist together.
#define LOAD_4(x, at, is_inside) ((is_inside) ? *(__global const float4*)(x + (at)) : (float4)(0.0f))
#define LOAD_1(x, at, is_inside) ((is_inside) ? x[at] : 0.0f)
#define LOAD_A(line, k, exists) \
  JOIN(LOAD_, A_WIDTH)(a, a_at + (ROW0 + (line)) * a_row + (k) * a_k, (exists) && ROW0 + (line) < rows)
#define LOAD_B(line, k, exists) \
  JOIN(LOAD_, B_WIDTH)(b, b_at + (k) * b_k + (COL0 + (line)) * b_col, (exists) && COL0 + (line) < cols)

WORK_GROUP __kernel void matmul(__global const float* a, const int a_offset, const int a_batch, const int a_row,
                                const int a_k, __global const float* b, const int b_offset, const int b_batch,
                                const int b_k, const int b_col, const int batches, const int rows, const int cols,
                                const int depth, const int each, const float alpha, const float beta,
                                __global const float* bias, const int bias_offset, const int bias_batch,
                                const int bias_row, const int bias_col, RESULTS) {
  TILES;
  const int batch = get_group_id(2) % batches, split = get_group_id(2) / batches;
  const int a_at = a_offset + batch * a_batch, b_at = b_offset + batch * b_batch;
  MULTIPLY(LOAD_A, LOAD_B, split * each, min(depth, (split + 1) * each))
  EACH(rows, cols)
    float scaled = alpha * sum;
    if (beta != 0.0f && split == 0)
      scaled += beta * bias[bias_offset + batch * bias_batch + row * bias_row + col * bias_col];
    STORE(((int)get_group_id(2) * rows + row) * cols + col, scaled);
  EACH_END
}
