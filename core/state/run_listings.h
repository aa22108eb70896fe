// SPDX-License-Identifier: Apache-2.0
//
// RunListings remembers the numbered directories that lie beside steps.  The state of a save may
// depend on the steps before it, and a run that is listed anew for each of its steps costs time as
// the square of their number.
//
// Thread safety: none.
// Lifetime: one look at a tree; directories that come later are not seen.  Roots must outlive it.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "core/base/result.h"
#include "core/io/root.h"

namespace ckptfs {

class RunListings {
 public:
  // A directory's number, and what the names of its run have in common ("checkpoint-").
  struct Numbered {
    std::string_view run;
    uint64_t number = 0;
  };
  using NumberedAs = std::optional<Numbered> (*)(std::string_view name);
  // The directories of one run, by number and name.
  using Steps = std::set<std::pair<uint64_t, std::string>>;

  // The directories in `directory` that `numbered` knows and no link leads to, of one run.  Lists
  // the first time and repeats an error after it; callers remove steps that are of no use.
  // REQUIRES: `numbered` is always the same.
  // BLOCKS: on listing.
  Result<Steps*> StepsOf(const Root& root, const std::string& directory, std::string_view run,
                         NumberedAs numbered);

 private:
  using Runs = std::map<std::string, Steps, std::less<>>;

  std::map<std::pair<const Root*, std::string>, Result<Runs>> listed_;  // by the directory
};

}  // namespace ckptfs
