namespace pv {
constexpr int DEPTH = 192;
constexpr int FEW_ROWS = 8;
constexpr int FEW_COLUMNS = 4;
constexpr int SAME_SET = 4096;
constexpr int AMX_TILE = 16;
constexpr int AMX_ROWS = 32;
constexpr int PLACES = 16;
constexpr int TAPS = 9;
constexpr int TRANSFORMED = 128;
constexpr int QUERIES = 24;
constexpr int ROWS_IN_PLACE = 3;
}  // namespace pv
