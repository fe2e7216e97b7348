// A tensor of torch's, without torch's header of it, which takes a compiler longer than most kernels: what kernels ask
// of a tensor, and how they make one. Each call is one of torch's own (binding/tensor.cpp).

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/array_ref.h"
#include "base/bfloat16.h"

namespace at {
class Tensor;
}

namespace twostep {

// The types of numbers that kernels know, by torch's numbers of them. A tensor may have another one, too.
enum class Dtype : int8_t {
  kByte = 0, kChar = 1, kInt = 3, kLong = 4, kFloat = 6, kDouble = 7, kBool = 11, kBFloat16 = 15
};
using enum Dtype;

std::string text_of(Dtype dtype);

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
  if (is_same_v<Element, BFloat16>) return kBFloat16;
  throw "no tensor has such numbers";
}

// Shares its numbers with its copies, as torch's own does, and may be none at all. Where its numbers lie is read once:
// nothing may move them, or resize a tensor, while there is one of these.
class Tensor {
 public:
  Tensor() = default;
  Tensor(const Tensor& other) noexcept : layout_(other.layout_) {
    if (defined()) hold_that_of(other);
  }
  Tensor(Tensor&& other) noexcept : layout_(std::exchange(other.layout_, {})), held_(other.held_) {}
  Tensor& operator=(Tensor other) noexcept {
    std::swap(layout_, other.layout_);
    std::swap(held_, other.held_);
    return *this;
  }
  ~Tensor() {
    if (defined()) release();
  }

  // Either becomes the other wherever one is wanted.
  Tensor(const at::Tensor& tensor);             // NOLINT(google-explicit-constructor)
  Tensor(at::Tensor&& tensor);                  // NOLINT(google-explicit-constructor)
  operator const at::Tensor&() const noexcept;  // NOLINT(google-explicit-constructor)

  bool defined() const noexcept { return layout_.sizes != nullptr; }
  bool is_same(const Tensor& other) const noexcept { return layout_.sizes == other.layout_.sizes; }  // are both one?
  void reset() noexcept { *this = Tensor(); }

  int64_t dim() const { return layout_.dim; }
  int64_t numel() const { return layout_.numel; }
  int64_t size(int64_t dim) const { return layout_.sizes[place_of(dim)]; }
  int64_t stride(int64_t dim) const { return layout_.strides[place_of(dim)]; }
  IntArrayRef sizes() const { return {layout_.sizes, static_cast<size_t>(layout_.dim)}; }
  IntArrayRef strides() const { return {layout_.strides, static_cast<size_t>(layout_.dim)}; }
  int64_t element_size() const { return layout_.element_size; }
  Dtype scalar_type() const { return layout_.dtype; }
  bool is_contiguous() const { return layout_.is_contiguous; }

  const void* const_data_ptr() const { return layout_.data; }
  void* mutable_data_ptr() const { return layout_.data; }

  // Raise where numbers are of another type.
  template <class Element>
  const Element* const_data_ptr() const {
    return mutable_data_ptr<Element>();
  }
  template <class Element>
  Element* mutable_data_ptr() const {
    if (scalar_type() != dtype_of<Element>()) raise_type(dtype_of<Element>());
    return static_cast<Element*>(layout_.data);
  }

  // Views, but where numbers must be copied for it.
  Tensor operator[](int64_t index) const;
  Tensor contiguous() const { return is_contiguous() ? *this : contiguous_clone(); }
  Tensor flatten(int64_t first_dim) const;
  Tensor narrow(int64_t dim, int64_t first, int64_t count) const;
  Tensor reshape(IntArrayRef sizes) const;
  Tensor select(int64_t dim, int64_t index) const;
  Tensor squeeze(int64_t dim) const;
  Tensor to(Dtype dtype) const;
  Tensor transpose(int64_t one, int64_t other) const;
  Tensor unsqueeze(int64_t dim) const;
  Tensor view(IntArrayRef sizes) const;
  Tensor view(Dtype dtype) const;
  std::vector<Tensor> unbind() const;

  Tensor clone() const;             // contiguous, if there are no gaps between its numbers: then of the same strides
  Tensor contiguous_clone() const;  // always
  bool equal(const Tensor& other) const;

  // They write into the tensor, and return it.
  const Tensor& copy_(const Tensor& from) const;
  const Tensor& zero_() const;

 private:
  // What torch knows of a tensor; sizes and strides are torch's own.
  struct Layout {
    void* data = nullptr;
    const int64_t *sizes = nullptr, *strides = nullptr;
    int64_t dim = 0, numel = 0;
    int32_t element_size = 0;
    Dtype dtype = Dtype(-1);
    bool is_contiguous = true;
  };

  void hold_that_of(const Tensor& other) noexcept;
  void release() noexcept;
  [[noreturn]] void raise_type(Dtype wanted) const;
  [[noreturn]] void raise_dim(int64_t dim) const;

  // Where a dimension is, which may be counted from the last one: -1.
  int64_t place_of(int64_t dim) const {
    const int64_t place = dim < 0 ? dim + layout_.dim : dim;
    if (place < 0 || place >= layout_.dim) raise_dim(dim);
    return place;
  }

  // Storage of torch's own tensor, which is one pointer, as long as this one is defined.
  struct Held {
    alignas(void*) std::byte bytes[sizeof(void*)];
  };

  Layout layout_;
  Held held_{};
};

int64_t element_size(Dtype dtype);  // in bytes

// Returns a contiguous tensor of unspecified content.
Tensor new_empty(IntArrayRef sizes, Dtype dtype);

// Returns one of the sizes and the dtype of another.
inline Tensor new_empty_like(const Tensor& tensor) { return new_empty(tensor.sizes(), tensor.scalar_type()); }

// Returns a tensor over memory, which it keeps.
Tensor over_memory(std::shared_ptr<void> memory, IntArrayRef sizes, Dtype dtype);

}  // namespace twostep
