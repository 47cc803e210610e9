// codegen.vectorize no transposed_pad: vectors along i1, the best axis, would cost more than scalar code: neighbours along i1 lie 80 elements apart in i0 + 80*i1
// codegen.parallel no transposed_pad: the whole kernel takes about 6.53e+03 ns in 80 iterations: one thread is enough
extern "C" int64_t k_lt_8a3892b053d1(void* const* p, const int64_t* s, int64_t begin, int64_t end) {
  const float* p0 = static_cast<const float*>(p[0]);                                                  // a  model.py:4
  float* p1 = static_cast<float*>(p[1]);                                                              // st  model.py:5
  const auto v1 = int64_t(100);                                                                       // n  model.py:2
  for (int64_t t = begin; t < end; t++) {                                                             // p, inside, a, st  model.py:1, model.py:3, model.py:4, model.py:5
    const int64_t i0 = t;
    for (int64_t i1 = 0; i1 < 104; i1++) {                                                            // p, inside, a, st  model.py:1, model.py:3, model.py:4, model.py:5
      const auto v0 = int64_t(i1);                                                                    // p  model.py:1
      const auto v2 = pv::lt(v0, v1);                                                                 // inside  model.py:3
      const auto v3 = pv::load(p0 + i0 + 80 * i1, v2, float(0.0));                                    // a  model.py:4
      pv::store(p1 + 104 * i0 + i1, v3);                                                              // st  model.py:5
    }
  }
  return 0;
}
