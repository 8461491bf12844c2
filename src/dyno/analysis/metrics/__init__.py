"""What a trial's answers are worth: accuracy, mAP, agreement, precision, arithmetic."""
