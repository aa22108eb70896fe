// SPDX-License-Identifier: Apache-2.0
//
// Configuration is what a daemon's options are, which of them its configuration file said, and what
// becomes of a change of that file while the daemon serves.  An option either has somebody who
// applies it, or waits for the next start.
//
// Thread safety: May before others call; then all methods may be called concurrently.  Reloads are
// done one after the other.
// Lifetime: what `apply` uses must outlive it.

#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <set>
#include <string>
#include <vector>

#include "core/base/mutex.h"
#include "core/base/result.h"
#include "mount/options.h"

namespace ckptfs {

struct ConfigurationRequest {
  std::string file;     // absolute; empty: there is none
  OptionValues values;  // in force
  std::set<std::string> from_file;
  std::function<Result<OptionValues>()> read_again = {};  // null without a file
};

class Configuration {
 public:
  // Puts these values in force, all or none.
  using Apply = std::function<Status(const OptionValues& now)>;

  explicit Configuration(ConfigurationRequest request) : request_(std::move(request)) {}

  // These options can change while the daemon serves.
  void May(std::vector<std::string> options, Apply apply);

  bool has_file() const { return !request_.file.empty(); }
  // Reads the file again: {"file", "applied": [name], "needs_restart": [name],
  // "failed": [{"option", "why"}]}.  kInvalid, and nothing changes, if the file breaks a rule or
  // there is none.
  Result<nlohmann::json> Reload();

  // {"file": path or null, "from_file": [name], "needs_restart": [name]}: the last ones changed in
  // the file and are not in force.
  nlohmann::json Describe() const;

 private:
  struct Changeable {
    std::vector<std::string> options;
    Apply apply;
  };

  ConfigurationRequest request_;  // `values` and `from_file` change under the lock
  std::vector<Changeable> changeable_;
  Mutex reload_;  // one at a time
  mutable Mutex mutex_;
  std::vector<std::string> waiting_ GUARDED_BY(mutex_);
};

// The one value of an option, or `absent`.
std::string ValueOf(const OptionValues& values, std::string_view option,
                    std::string_view absent = "");

}  // namespace ckptfs
