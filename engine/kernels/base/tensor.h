// A tensor of torch's, without torch's header of it, which takes a compiler longer than most kernels: what kernels ask
// of a tensor, and how they make one. Each call is one of torch's own (binding/tensor.cpp).

#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <memory>
#include <type_traits>
#include <vector>

namespace at {
class Tensor;
}

namespace twostep {

// The types of numbers that kernels know, by torch's numbers of them. A tensor may have another one, too.
enum class Dtype : int8_t {
  kByte = 0, kChar = 1, kInt = 3, kLong = 4, kFloat = 6, kDouble = 7, kBool = 11, kBFloat16 = 15
};
using enum Dtype;

std::ostream& operator<<(std::ostream& out, Dtype dtype);

// The type of a tensor's numbers that are such in C++.
template <class Element>
consteval Dtype dtype_of() {
  using std::is_same_v;
  if (is_same_v<Element, uint8_t>) return kByte;
  if (is_same_v<Element, int8_t>) return kChar;
  if (is_same_v<Element, int32_t>) return kInt;
  if (is_same_v<Element, int64_t>) return kLong;
  if (is_same_v<Element, float>) return kFloat;
  if (is_same_v<Element, double>) return kDouble;
  if (is_same_v<Element, bool>) return kBool;
  if (is_same_v<Element, at::BFloat16>) return kBFloat16;
  throw "no tensor has such numbers";
}

// Shares its numbers with its copies, as torch's own does, and may be none at all.
class Tensor {
 public:
  Tensor() noexcept;
  Tensor(const Tensor& other) noexcept;
  Tensor(Tensor&& other) noexcept;
  Tensor& operator=(const Tensor& other) noexcept;
  Tensor& operator=(Tensor&& other) noexcept;
  ~Tensor();

  // Either becomes the other wherever one is wanted.
  Tensor(const at::Tensor& tensor) noexcept;    // NOLINT(google-explicit-constructor)
  operator const at::Tensor&() const noexcept;  // NOLINT(google-explicit-constructor)

  bool defined() const noexcept;
  bool is_same(const Tensor& other) const noexcept;  // whether both are one tensor
  void reset() noexcept;

  int64_t dim() const;
  int64_t numel() const;
  int64_t size(int64_t dim) const;
  int64_t stride(int64_t dim) const;
  at::IntArrayRef sizes() const;
  at::IntArrayRef strides() const;
  int64_t element_size() const;
  Dtype scalar_type() const;
  bool is_contiguous() const;

  const void* const_data_ptr() const;
  void* mutable_data_ptr() const;

  // Raise where numbers are of another type.
  template <class Element>
  const Element* const_data_ptr() const {
    check_type(dtype_of<Element>());
    return static_cast<const Element*>(const_data_ptr());
  }
  template <class Element>
  Element* mutable_data_ptr() const {
    check_type(dtype_of<Element>());
    return static_cast<Element*>(mutable_data_ptr());
  }

  // Views, but where numbers must be copied for it.
  Tensor operator[](int64_t index) const;
  Tensor contiguous() const;
  Tensor flatten(int64_t first_dim) const;
  Tensor narrow(int64_t dim, int64_t first, int64_t count) const;
  Tensor reshape(at::IntArrayRef sizes) const;
  Tensor select(int64_t dim, int64_t index) const;
  Tensor squeeze(int64_t dim) const;
  Tensor to(Dtype dtype) const;
  Tensor transpose(int64_t one, int64_t other) const;
  Tensor unsqueeze(int64_t dim) const;
  Tensor view(at::IntArrayRef sizes) const;
  Tensor view(Dtype dtype) const;
  std::vector<Tensor> unbind() const;

  Tensor clone() const;             // contiguous, if there are no gaps between its numbers: then of the same strides
  Tensor contiguous_clone() const;  // always
  bool equal(const Tensor& other) const;

  // They write into the tensor, and return it.
  const Tensor& copy_(const Tensor& from) const;
  const Tensor& zero_() const;

 private:
  void check_type(Dtype wanted) const;
  at::Tensor& held() noexcept;

  alignas(void*) std::byte storage_[sizeof(void*)];  // of torch's own tensor, which is one pointer
};

int64_t element_size(Dtype dtype);  // in bytes

// Returns a contiguous tensor of unspecified content.
Tensor new_empty(at::IntArrayRef sizes, Dtype dtype);

// Returns one of the sizes and the dtype of another.
inline Tensor new_empty_like(const Tensor& tensor) { return new_empty(tensor.sizes(), tensor.scalar_type()); }

// Returns a tensor over memory, which it keeps.
Tensor over_memory(std::shared_ptr<void> memory, at::IntArrayRef sizes, Dtype dtype);

}  // namespace twostep
