// Multiplies weights in each format and prints hashes of what comes out: for CPUs that are only emulated.
#include "products.cpp"

#include <cstdio>
#include <cstring>
#include <random>

template <class Format>
static void print_hash(int64_t format) {
  constexpr int64_t kHalves = Format::kNests ? Format::kStepBytes : Format::kHeadBytes;
  const bool takes_eight = PackedMatrix({nullptr, format, 0}, 0).takes_eight();
  uint64_t hash = 1469598103934665603u;  // FNV-1a
  for (int64_t K : {45, 64, 96, 576})
    for (int64_t R : {16, 50, 130})
      for (int64_t T : {1, 2, 3, 5, 8, 9, 17}) {
        std::mt19937 random(unsigned(1000 * K + R));
        std::vector<uint8_t> weights(size_t(Format::group_bytes(K) * ceil_div(R, kGroupRows)));
        for (uint8_t& byte : weights) byte = uint8_t(random());
        for (size_t run = 0; run < weights.size(); run += size_t(Format::kRunBytes))
          for (size_t i = 1; i < size_t(kHalves); i += 2) weights[run + i] &= 0xbb;  // finite scales
        std::vector<float> x(size_t(T * K)), out(size_t(T * R));
        for (float& value : x) value = float(int(random() % 2001) - 1000) / 77;
        for (int64_t in_eight = 0; in_eight <= takes_eight; ++in_eight) {
          foredraft_multiply(kFormPacked, format, weights.data(), 0, R, K, x.data(), T, in_eight, out.data());
          for (float value : out) {
            uint32_t bits;
            std::memcpy(&bits, &value, sizeof bits);
            hash = (hash ^ bits) * 1099511628211u;
          }
        }
      }
  std::printf("%016llx\n", static_cast<unsigned long long>(hash));
}

int main() {
  print_hash<Int8>(kInt8);
  print_hash<Int4>(kInt4);
  print_hash<Int5>(kInt5);
  print_hash<Nested4>(kNested4);
  print_hash<Nested5>(kNested5);
  print_hash<Nested6>(kNested6);
  print_hash<Centred4>(kCentred4);
  print_hash<Centred5>(kCentred5);
}
