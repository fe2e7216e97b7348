// Scratch memory of one thread.

#pragma once

#include <cstdint>
#include <memory>
#include <new>

namespace twostep {

// Memory that is kept between calls and grown on demand.
template <class T>
class Scratch {
 public:
  // Returns memory of unspecified content, aligned to a cache line; throws std::bad_alloc.
  T* get(int64_t count) {
    if (count > count_) {
      memory_.reset();
      count_ = 0;
      memory_.reset(static_cast<T*>(::operator new(count * sizeof(T), kLine)));
      count_ = count;
    }
    return memory_.get();
  }

 private:
  static constexpr std::align_val_t kLine{64};

  struct Free {
    void operator()(T* memory) const { ::operator delete(memory, kLine); }
  };

  std::unique_ptr<T, Free> memory_;
  int64_t count_ = 0;
};

}  // namespace twostep
