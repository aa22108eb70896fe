// SPDX-License-Identifier: Apache-2.0
//
// Command is one row of the table that the command line is: a name, what it
// takes, and the body that runs when it was chosen.  The library that parses
// words is seen by command_set.cc alone.
//
// Thread safety: used by the process's first thread only.
// Lifetime: targets must outlive the command; they are shared by its body.

#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include "core/base/result.h"

namespace ckptfs {

// The result of a body: an error becomes a line on stderr and an exit code.
using CommandBody = std::function<Status()>;

// Why a word is not a value; empty: it is.
using ValueCheck = std::function<std::string(const std::string&)>;

// A value that `parse` (string to Result) refuses makes the command line wrong.
template <class Parse>
ValueCheck Checked(Parse parse) {
  return [parse](const std::string& text) {
    const auto parsed = parse(text);
    return parsed ? std::string() : parsed.error().message;
  };
}

// The words that a shell offers for a value, joined by |.
enum Offer : unsigned {
  kOfferNothing = 0,
  kOfferFiles = 1,
  kOfferSteps = 2,  // RUN/ID of the store
  kOfferRuns = 4,
  kOfferIds = 8,  // those of the run that is the first word
};

struct CommandOption {
  // Where the value goes; a bool is a flag without one, and of an option with a
  // list each occurrence adds one (of a positional: each word).
  using Target = std::variant<std::string*, std::vector<std::string>*, bool*, unsigned*, uint64_t*>;

  std::string name;  // "--step", or "STEP" where it goes by its position
  Target target;
  std::string help;
  std::string value;  // how a value is written: "RUN/ID"
  ValueCheck check;   // empty: any
  bool required = false;
  std::string excludes;                 // the option that it cannot be given with
  uint64_t initial = 0;                 // of a number, where it is not given
  std::optional<unsigned> offers = {};  // Offer; none: what `value` says
  bool line_only = false;               // a configuration file cannot say it

  bool positional() const { return !name.starts_with('-'); }
  bool many() const { return std::holds_alternative<std::vector<std::string>*>(target); }

  CommandOption& Required() { return required = true, *this; }
  CommandOption& Value(std::string written) { return value = std::move(written), *this; }
  CommandOption& Offers(unsigned words) { return offers = words, *this; }
  CommandOption& Check(ValueCheck checked) { return check = std::move(checked), *this; }
  CommandOption& LineOnly() { return line_only = true, *this; }
  CommandOption& Excludes(std::string other) { return excludes = std::move(other), *this; }
};

struct Command {
  std::string name;
  std::string description;
  std::deque<CommandOption> options;  // references to its elements stay valid
  CommandBody body;
  std::deque<CommandOption> file_options = {};  // that a configuration file says, and no line
  std::vector<std::string> words = {};          // the command line, once it was parsed
  std::string config = {};                      // the absolute path of the file that was read
  std::set<std::string> from_file = {};         // names of the options that it has set

  template <class T>
  CommandOption& Add(std::string option, T& target, std::string help) {
    return AddTo(options, std::move(option), target, std::move(help));
  }
  // An option, written as one with dashes, that only a configuration file has.
  template <class T>
  CommandOption& AddToFile(std::string option, T& target) {
    return AddTo(file_options, std::move(option), target, "");
  }

 private:
  template <class T>
  static CommandOption& AddTo(std::deque<CommandOption>& list, std::string option, T& target,
                              std::string help) {
    CommandOption& added = list.emplace_back(
        CommandOption{std::move(option), &target, std::move(help), {}, {}, false, {}, 0});
    if constexpr (std::is_same_v<T, unsigned> || std::is_same_v<T, uint64_t>)
      added.initial = target;
    return added;
  }
};

}  // namespace ckptfs
