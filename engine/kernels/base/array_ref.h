// Numbers or parts that lie one after the other in somebody else's memory.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace twostep {

template <class T>
class ArrayRef {
 public:
  ArrayRef() = default;
  ArrayRef(const T* data, size_t size) : data_(data), size_(size) {}
  ArrayRef(const T& one) : data_(&one), size_(1) {}  // NOLINT(google-explicit-constructor)

  // What is in braces lives as long as the call that it is an argument of.
  ArrayRef(std::initializer_list<T> all) : ArrayRef(all.begin(), all.size()) {}  // NOLINT(google-explicit-constructor)

  template <class All>
    requires requires(const All& all) { all.data() + all.size(); }
  ArrayRef(const All& all) : data_(all.data()), size_(all.size()) {}  // NOLINT(google-explicit-constructor)

  const T* data() const { return data_; }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  const T* begin() const { return data_; }
  const T* end() const { return data_ + size_; }
  const T& front() const { return data_[0]; }
  const T& back() const { return data_[size_ - 1]; }
  const T& operator[](size_t index) const { return data_[index]; }
  ArrayRef slice(size_t first) const { return slice(first, size_ - first); }
  ArrayRef slice(size_t first, size_t count) const { return {data_ + first, count}; }

  friend bool operator==(ArrayRef one, ArrayRef other) {
    return std::equal(one.begin(), one.end(), other.begin(), other.end());
  }

 private:
  const T* data_ = nullptr;
  size_t size_ = 0;
};

using IntArrayRef = ArrayRef<int64_t>;

}  // namespace twostep
