// Conversions between types.
namespace pv {

// A float is converted to u32 or u64 via the signed type, as in ATen, after subtracting 2^31 or 2^63 if it is too large
// for that.
template <class To, class From>
constexpr bool is_wide_unsigned = is_float<From> && sizeof(To) >= 4 && std::is_unsigned_v<To>;
template <class To> constexpr To sign_bit = To(1) << (8 * sizeof(To) - 1);

template <class To, class From> PV_FN To cast(From a) {
  if constexpr (std::is_same_v<To, bool>) return a != From(0);
  else if constexpr (is_float<From> && !is_float<To> && sizeof(To) < 4) return To(int32_t(a));  // the low bits
  else if constexpr (is_wide_unsigned<To, From>) {
    using S = std::make_signed_t<To>;
    return a >= From(sign_bit<To>) ? To(S(a - From(sign_bit<To>))) ^ sign_bit<To> : To(S(a));
  } else return To(a);
}
template <class To, class From, int W> PV_FN Vec<To, W> cast(const Vec<From, W>& a) {
  if constexpr (std::is_same_v<To, From>) return a;
  else if constexpr (std::is_same_v<To, bool>) return compare<NE>(a, splat<W>(From(0)));
  else if constexpr (std::is_same_v<From, bool>) return where(a, splat<W>(To(1)), splat<W>(To(0)));
  else if constexpr (is_float<From> && !is_float<To> && sizeof(To) < 4) return convert<To>(convert<int32_t>(a));
  else if constexpr (is_float<To> && sizeof(From) < 4) return convert<To>(convert<int32_t>(a));
  else if constexpr (is_wide_unsigned<To, From>) {
    using S = std::make_signed_t<To>;
    const auto high = splat<W>(From(sign_bit<To>));
    const auto flipped = bitwise_xor(convert<S>(sub(a, high)), splat<W>(S(sign_bit<To>)));
    return as<To>(where(ge(a, high), flipped, convert<S>(a)));
  } else return convert<To>(a);
}

}  // namespace pv
