// A vector of mostly few elements, which then need no allocation.

#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <utility>

namespace twostep {

// Has room for `kRoom` elements inside of itself.
template <class T, size_t kRoom>
class SmallVector {
 public:
  SmallVector() = default;
  SmallVector(SmallVector&& other) noexcept {
    for (T& each : other) push_back(std::move(each));
  }
  SmallVector& operator=(SmallVector&&) = delete;
  ~SmallVector() {
    std::destroy(begin(), end());
    free_elsewhere();
  }

  void push_back(T element) {
    if (size_ == room_) grow();
    new (data() + size_) T(std::move(element));
    ++size_;
  }

  T* data() { return elsewhere_ ? elsewhere_ : std::launder(reinterpret_cast<T*>(inside_)); }
  const T* data() const { return const_cast<SmallVector*>(this)->data(); }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T* begin() { return data(); }
  T* end() { return data() + size_; }
  const T* begin() const { return data(); }
  const T* end() const { return data() + size_; }
  const T& front() const { return data()[0]; }
  const T& back() const { return data()[size_ - 1]; }
  T& operator[](size_t index) { return data()[index]; }
  const T& operator[](size_t index) const { return data()[index]; }

 private:
  static constexpr std::align_val_t kAlignment{alignof(T)};

  void grow() {
    T* const larger = static_cast<T*>(::operator new(2 * room_ * sizeof(T), kAlignment));
    std::uninitialized_move(begin(), end(), larger);
    std::destroy(begin(), end());
    free_elsewhere();
    elsewhere_ = larger, room_ *= 2;
  }

  void free_elsewhere() {
    if (elsewhere_) ::operator delete(elsewhere_, kAlignment);
  }

  size_t size_ = 0, room_ = kRoom;
  T* elsewhere_ = nullptr;
  alignas(T) std::byte inside_[kRoom * sizeof(T)];
};

}  // namespace twostep
