// SPDX-License-Identifier: Apache-2.0

#include "snapshot/landing/landing_state.h"

#include <algorithm>
#include <array>

namespace ckptfs {
namespace {

using State = LandingState;
using Event = LandingEvent;
using Action = LandingAction;

constexpr std::array kTransitions{
    LandingTransition{State::kWhole, Event::kEntered, State::kShown, Action::kPersist},
    LandingTransition{State::kWhole, Event::kFound, State::kDurable, Action::kDurable},
    LandingTransition{State::kWhole, Event::kPrepared, State::kPrepared, Action::kLook},
    LandingTransition{State::kWhole, Event::kRefused, State::kDropped, Action::kDrop},
    LandingTransition{State::kWhole, Event::kGaveUp, State::kDropped, Action::kDrop},
    LandingTransition{State::kWhole, Event::kLeft, State::kLeft, Action::kForget},
    LandingTransition{State::kShown, Event::kPersisted, State::kDurable, Action::kDurable},
    LandingTransition{State::kShown, Event::kRefused, State::kDropped, Action::kDrop},
    LandingTransition{State::kShown, Event::kGaveUp, State::kDropped, Action::kDrop},
    LandingTransition{State::kShown, Event::kLeft, State::kLeft, Action::kForget},
    LandingTransition{State::kPrepared, Event::kDecided, State::kDecided, Action::kLook},
    LandingTransition{State::kPrepared, Event::kPublished, State::kDurable, Action::kDurable},
    LandingTransition{State::kPrepared, Event::kRefused, State::kDropped, Action::kDrop},
    LandingTransition{State::kPrepared, Event::kGaveUp, State::kDropped, Action::kDrop},
    LandingTransition{State::kDecided, Event::kPublished, State::kDurable, Action::kDurable},
    // Nobody can publish what was decided: its files or its manifest are damaged.
    LandingTransition{State::kDecided, Event::kRefused, State::kDropped, Action::kDrop},
    LandingTransition{State::kDecided, Event::kGaveUp, State::kDropped, Action::kDrop},
};

struct FinalCode {
  Action action;
  ErrorCode code;
};

constexpr std::array kFinal{
    FinalCode{Action::kEnter, ErrorCode::kInvalid},  // it is not a step
    FinalCode{Action::kEnter, ErrorCode::kUnsupported},
    FinalCode{Action::kEnter, ErrorCode::kExists},  // its name is another run's
    FinalCode{Action::kEnter, ErrorCode::kDataLoss},
    FinalCode{Action::kPersist, ErrorCode::kDataLoss},  // its bytes changed
    FinalCode{Action::kPrepare, ErrorCode::kInvalid},
    FinalCode{Action::kPrepare, ErrorCode::kExists},
    FinalCode{Action::kPrepare, ErrorCode::kDataLoss},
    FinalCode{Action::kLook, ErrorCode::kInvalid},
    FinalCode{Action::kLook, ErrorCode::kExists},
    FinalCode{Action::kLook, ErrorCode::kDataLoss},
};

}  // namespace

std::span<const LandingTransition> LandingTransitions() { return kTransitions; }

const LandingTransition* TransitionOf(LandingState from, LandingEvent event) {
  const auto* const row = std::ranges::find_if(kTransitions, [&](const LandingTransition& one) {
    return one.from == from && one.event == event;
  });
  return row == kTransitions.end() ? nullptr : row;
}

bool IsFinal(LandingAction action, ErrorCode code) {
  return std::ranges::any_of(
      kFinal, [&](const FinalCode& one) { return one.action == action && one.code == code; });
}

std::string_view NameOf(LandingState state) {
  switch (state) {
    case State::kWhole: return "whole";
    case State::kShown: return "shown";
    case State::kPrepared: return "prepared";
    case State::kDecided: return "decided";
    case State::kDurable: return "durable";
    case State::kDropped: return "dropped";
    case State::kLeft: return "left in the spool";
  }
  return "";
}

}  // namespace ckptfs
