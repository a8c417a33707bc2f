// A kernel over whole rows of a product, joined to its dataflow:  store  --row_stream-->  normalise
//
// It keeps a strip of TILE_ROWS rows in block RAM until all their columns are there, then does NORMALISE of the file before this
// one. Loops over rows are the inner ones: a sum along a row is added to every TILE_ROWS cycles. Rows have up to ROW_COLS columns.
//
//   stream       vectors in a tile               floats      sent by  received by
//   row_stream   TILE_ROWS * INTERLEAVE_COLS     ARRAY_COLS  store    normalise
//
// The sheet, as in dataflow.cl:
//
//   normalise      1                197120              1                   0

#define EACH_ROW for (int r = 0; r < TILE_ROWS; r++)
#define EACH_COL for (int j = 0; j < cols; j++)
#define ROW_NUMBER (batch * rows + row0 + r)
#define IN_C (row0 + r < rows)

#define STRIP __local float strip[TILE_ROWS][ROW_COLS]
#define KEEP(element, value) lanes[lane] = STORE(element, value)
#define ROW_PLACE (strip[ROW_AT] + col0 + at % INTERLEAVE_COLS * ARRAY_COLS)
#define FINISH_ROWS if (col0 + TILE_COLS >= cols) { NORMALISE }

#ifdef CHANNELS
channel b_vector row_stream __attribute__((depth(CAPACITY)));
#define SEND_ROWS SEND(row_stream, LOAD_B(0, lanes));
#define RECEIVE_ROWS STORE_B(RECEIVE(row_stream), 0, ROW_PLACE);

SINGLE __kernel void normalise(PROBLEM, ROW_ARGUMENTS) {
  STRIP;
  EACH_TILE
    EACH_VECTOR RECEIVE_ROWS END
    FINISH_ROWS
  END
}
#else
#define SEND_ROWS
#define RECEIVE_ROWS STORE_B(LOAD_B(0, lanes), 0, ROW_PLACE);
#endif
