// SPDX-License-Identifier: Apache-2.0
//
// Translations are steps under the names of other dialects: each is made once for all views that
// show it, and those used last are kept.  Which model a step is of, its config.json says; without
// that nothing is translated.  Sizes that a table asks for are the config's and those that the step
// was adopted with, which must agree.
//
// Thread safety: all methods may be called concurrently.
// Lifetime: translated steps are their callers'; a kept one keeps the step that it was made of.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/base/loading_cache.h"
#include "core/base/lru.h"
#include "core/base/result.h"
#include "core/dialect/translate.h"
#include "core/model/layout.h"
#include "core/model/step_model.h"
#include "formats/tools/model_files.h"

namespace ckptfs {

class Translations {
 public:
  // Bounds the translations that are kept beside those used last.
  static constexpr uint64_t kKeptBytes = uint64_t{1} << 30;
  static constexpr uint64_t kSaidBytes = uint64_t{64} << 20;  // of what is known of steps

  // `given`: for steps that do not have a config.json (mount --hf-config).
  static Result<std::shared_ptr<Translations>> Make(std::optional<ModelFiles> given);

  // The dialect that config, names and shapes prove.
  FoundDialect Of(const std::shared_ptr<const StepModel>& step);
  // The step in the dialect; itself where it is in it.  From one dialect to another by way of the
  // files' names.  Errors as Translate's, and for quantised weights, whose scales have names of
  // their own.
  Result<std::shared_ptr<const StepModel>> To(const std::shared_ptr<const StepModel>& step,
                                              Dialect to, Carried carried = Carried::kAll);

 private:
  struct Key {
    const StepModel* step = nullptr;
    Dialect to = Dialect::kAsSource;
    Carried carried = Carried::kAll;
    bool operator==(const Key&) const = default;
  };
  struct KeyHash {
    size_t operator()(const Key& key) const {
      return std::hash<const StepModel*>()(key.step) * 31 + static_cast<size_t>(key.to) * 2 +
             static_cast<size_t>(key.carried);
    }
  };
  struct Made {
    std::shared_ptr<const StepModel> of;  // no other step has its address meanwhile
    std::shared_ptr<const StepModel> step;
  };
  using MadePtr = std::shared_ptr<const Made>;
  struct Said {
    std::weak_ptr<const StepModel> of;
    Dialect table = Dialect::kAsSource;  // that found it
    DialectEvidence evidence;
  };
  using SaidPtr = std::shared_ptr<const Said>;
  struct Config {
    ModelKind kind;
    bool quantised = false;
  };

  // A table, and the dialect that it makes of files' names.
  struct Table {
    Dialect dialect = Dialect::kAsSource;
    DialectTable table;
  };

  Translations(std::optional<ModelFiles> given, std::vector<Table> tables, FamilySet families);
  Config ConfigOf(const StepModel& step) const;
  Said Find(const StepModel& step) const;
  SaidPtr SaidOf(const std::shared_ptr<const StepModel>& step);
  DialectEvidence Look(const StepModel& step, Dialect table) const;

  const std::optional<ModelFiles> given_;
  const std::vector<Table> tables_;
  const FamilySet families_;
  Lru<const StepModel*, SaidPtr> said_;
  LoadingCache<Key, MadePtr, KeyHash> kept_;
};

}  // namespace ckptfs
