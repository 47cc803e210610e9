// codegen.vectorize yes transposed: 16 lanes along i1, cheaper than along i0
// codegen.tile yes transposed, x: it is contiguous along i0: squares are read along that axis and transposed in registers
// codegen.parallel yes transposed: an iteration takes about 809 ns, so 4 of 13 are worth a thread
extern "C" int64_t k_mul_a79a3d3c120e(void* const* p, const int64_t* s, int64_t begin, int64_t end) {
  const pv::bf16* p0 = static_cast<const pv::bf16*>(p[0]);                                            // a  model.py:1
  const float* p1 = static_cast<const float*>(p[1]);                                                  // b  model.py:2
  float* p2 = static_cast<float*>(p[2]);                                                              // st  model.py:4
  for (int64_t t = begin; t < end; t++) {                                                             // a, b, c, st  model.py:1, model.py:2, model.py:3, model.py:4
    const int64_t from = t * 16;
    const int64_t to = pv::least(from + 16, 200);
    pv::steps<16>(0, 300, [&](auto n, int64_t i1) PV_INLINE {                                         // a, b, c, st  model.py:1, model.py:2, model.py:3, model.py:4
      const pv::Tile<pv::bf16, 16> x0(p0, from + 200 * i1, 200, to - from, n, 60000);                 // a  model.py:1
      for (int64_t i0 = from; i0 < to; i0++) {                                                        // a, b, c, st  model.py:1, model.py:2, model.py:3, model.py:4
        const auto v0 = x0.row(i0 - from);                                                            // a  model.py:1
        const auto v1 = pv::load<float>(p1 + 300 * i0 + i1, n);                                       // b  model.py:2
        const auto v2 = pv::mul(v0, v1);                                                              // c  model.py:3
        pv::store<float>(p2 + 300 * i0 + i1, v2, n);                                                  // st  model.py:4
      }
    });
  }
  return 0;
}
