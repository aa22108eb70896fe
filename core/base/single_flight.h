// SPDX-License-Identifier: Apache-2.0
//
// SingleFlight makes a value once for all who want it at the same time: the
// first to ask leads, the others wait for what he lands.  It keeps nothing
// afterwards; a leader whose value is cached looks into the cache again before
// he works (another flight may have landed since the first look), and fills
// the cache before he lands.
//
// Thread safety: all methods may be called concurrently.  A caller that leads
// several flights lands all of them before it waits for any: then no two
// callers wait for each other.
// Lifetime: must outlive its flights.

#pragma once

#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <new>
#include <string>
#include <unordered_map>
#include <utility>

#include "core/base/mutex.h"
#include "core/base/result.h"

namespace ckptfs {

// call(), which returns a Result or Status; an exception becomes an error, so
// that nobody waits for ever and nothing is thrown into a thread of FUSE.
template <class Call>
auto Caught(Call&& call) -> decltype(call()) {
  try {
    return call();
  } catch (const std::bad_alloc&) {
    return Fail(ErrorCode::kExhausted, "out of memory");
  } catch (const std::exception& thrown) {
    return Fail(ErrorCode::kInternal, thrown.what());
  }
}

template <class Key, class Value, class Hash = std::hash<Key>>
class SingleFlight {
  struct State {
    std::promise<Result<Value>> promise;
    std::shared_future<Result<Value>> landed = promise.get_future().share();
  };

 public:
  // One caller's part in making a value.  A leader that goes without landing
  // (by an exception) lands an error.
  class Flight {
   public:
    Flight(Flight&& other) noexcept
        : owner_(std::exchange(other.owner_, nullptr)),
          key_(std::move(other.key_)),
          state_(std::move(other.state_)) {}
    Flight& operator=(Flight&&) = delete;
    ~Flight() {
      if (leads()) Land(Fail(ErrorCode::kInternal, "the caller that was to make it gave up"));
    }

    bool leads() const { return owner_ != nullptr; }
    // REQUIRES: leads(), which ends.
    void Land(Result<Value> value) {
      std::exchange(owner_, nullptr)->Forget(key_);
      state_->promise.set_value(std::move(value));
    }
    // For who waits for several, or hands a flight that he leads to another thread.
    std::shared_future<Result<Value>> landed() const { return state_->landed; }
    // BLOCKS: until the leader lands.
    // REQUIRES: !leads().
    Result<Value> Wait() const { return state_->landed.get(); }

   private:
    friend class SingleFlight;
    Flight(SingleFlight* owner, Key key, std::shared_ptr<State> state)
        : owner_(owner), key_(std::move(key)), state_(std::move(state)) {}

    SingleFlight* owner_;  // null: somebody else leads
    Key key_;
    std::shared_ptr<State> state_;
  };

  Flight Join(const Key& key) {
    auto fresh = std::make_shared<State>();
    MutexLock lock(mutex_);
    const auto [place, first] = flights_.try_emplace(key, std::move(fresh));
    return Flight(first ? this : nullptr, key, place->second);
  }

  // Somebody is making it.
  bool Flies(const Key& key) const {
    MutexLock lock(mutex_);
    return flights_.contains(key);
  }

  // make()'s value, or that of the caller who is making it; exceptions are
  // errors.  BLOCKS: on either.
  template <class Make>
  Result<Value> Do(const Key& key, Make&& make) {
    Flight flight = Join(key);
    if (!flight.leads()) return flight.Wait();
    Result<Value> made = Caught([&]() -> Result<Value> { return make(); });
    flight.Land(made);
    return made;
  }

 private:
  void Forget(const Key& key) {
    MutexLock lock(mutex_);
    flights_.erase(key);
  }

  mutable Mutex mutex_;
  std::unordered_map<Key, std::shared_ptr<State>, Hash> flights_ GUARDED_BY(mutex_);
};

}  // namespace ckptfs
